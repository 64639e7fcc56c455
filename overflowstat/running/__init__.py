"""What `python -m overflowstat run` is made of: a script run as Python runs it, and its models found and watched."""
