"""APIs of other software, built from octavo: see docs/compat.md."""

from octavo.compat.dynamic_scaler import DynamicScaler

__all__ = ["DynamicScaler"]
