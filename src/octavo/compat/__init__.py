"""Names of other software, built only from octavo's own parts: see docs/compat.md."""

from octavo.compat.dynamic_scaler import DynamicScaler

__all__ = ["DynamicScaler"]
