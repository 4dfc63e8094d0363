"""HTML pages of results: each one file, drawn from templates/, that opens anywhere without a network.

One module a page (doctor, study, sensitivity, benchmark) prepares plain data; templates/ holds the HTML, escaped by
jinja2, and the one style sheet. Plotly draws the figures. Both libraries are the ``report`` extra and are imported only
when a page is written.
"""
