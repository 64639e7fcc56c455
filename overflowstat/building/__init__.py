"""What there is to build with, and what is built from it.

Standard library only, and no import but of its own files: setup.py loads this folder by its path, before anything is
installed. Most of it looks at the machine; `plan.make_plan` decides, and looks at nothing but the facts, so that every
case can be tested anywhere.
"""
