"""HTML from jinja2 templates: the engine of every page, and summaries of objects in notebooks.

A page is a whole document (octavo.reports); a summary is a fragment that a notebook puts into its own page, in that
page's colours.
"""
