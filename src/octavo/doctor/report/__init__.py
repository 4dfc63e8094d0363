"""``report.html``: what the doctor measured and found, as one page that opens anywhere, offline."""

from octavo.doctor.report.captured import histograms_of
from octavo.doctor.report.histogram import Histogram
from octavo.doctor.report.render import render

__all__ = ["Histogram", "histograms_of", "render"]
