"""Figures of octavo's objects by one call, as plotly figures: for notebooks, or ``figure.write_html(path)``.

Plotly is the ``report`` extra and is imported by the call.
"""

from octavo.plot.amax_history import history
from octavo.plot.code_histogram import codes
from octavo.plot.layer_map import heat_map
from octavo.plot.loss_curves import losses

__all__ = ["codes", "heat_map", "history", "losses"]
