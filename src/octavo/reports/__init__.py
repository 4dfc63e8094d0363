"""HTML pages of results: each is one file that opens without a network.

One module per page (doctor, study, sensitivity, benchmark) prepares plain data; templates/ holds the HTML, escaped by
jinja2, and the style sheet. Plotly draws the figures. Both libraries are the ``report`` extra and are imported only
when a page is written.
"""
