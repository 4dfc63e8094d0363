"""HTML pages of results: they open without a network, in light and dark mode, on a desk and a phone.

One module per page (doctor, study, sensitivity, benchmark) prepares plain data; templates/ holds the HTML, escaped by
jinja2, and the style sheet. Plotly draws the figures; its script lies beside the pages of a folder. Both libraries are
the ``report`` extra and are imported only when a page is written.
"""
