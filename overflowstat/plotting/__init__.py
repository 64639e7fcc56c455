"""Pictures of a trace. What they show is prepared once (chart.py), and drawn as a page (page.py) or by matplotlib
(png.py)."""
