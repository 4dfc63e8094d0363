"""Former name of :mod:`octavo.text.tokens`; works for one release, with a DeprecationWarning."""

from octavo._former_names import forward

__getattr__, __dir__ = forward(__name__, "octavo.text.tokens")
