"""The exceptions octavo raises, one tree.

    OctavoError                 anything octavo refuses; its text is one sentence a user can act on
    ├── ConfigError             a recipe, configuration or argument value that is not allowed (also a ValueError)
    │   └── ContextLengthError  a prompt and its answer that need more positions than there are
    ├── DataError               text or token data that is missing, empty, binary or too short (also a ValueError)
    ├── CheckpointError         a checkpoint or scaling state that is damaged or belongs to another model
    ├── BackendError            an explicitly requested backend that cannot run the problem, with its reason
    ├── QueueFullError          an engine with too many requests waiting; with the delay before a retry
    ├── ClosedError             an engine that takes no more requests
    ├── TritonError             Triton's server did not become ready, or ended by itself; carries the end of its log
    └── TrainingError           a run that cannot go on
        └── NonFiniteLossError  the loss became NaN or Inf; names the step, the tensor and the last good checkpoint

A wrong *type* of argument raises the built-in TypeError. ``assert`` guards octavo's own invariants only.
"""

__all__ = [
    "BackendError",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "ContextLengthError",
    "DataError",
    "NonFiniteLossError",
    "OctavoError",
    "QueueFullError",
    "TrainingError",
    "TritonError",
]


class OctavoError(Exception):
    """Base of everything octavo refuses to do."""


class ConfigError(OctavoError, ValueError):
    """A value that is not allowed; the message names it, the allowed values and a remedy."""


class ContextLengthError(ConfigError):
    """A prompt and an answer that are longer together than a model or its cache has positions."""


class DataError(OctavoError, ValueError):
    """Data that cannot be used: missing, empty, binary, or shorter than the context."""


class CheckpointError(OctavoError):
    """A checkpoint or scaling state that is damaged, incomplete or made for another model."""


class BackendError(OctavoError):
    """A backend that was asked for by name cannot run this problem; carries its reason."""


class QueueFullError(OctavoError):
    """An engine with too many requests waiting.

    Attributes:
        retry_after_s: when to try again, in seconds.
    """

    def __init__(self, text: str, *, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class ClosedError(OctavoError):
    """An engine that is being shut down."""


class TritonError(OctavoError):
    """Triton Inference Server that did not become ready, or that ended by itself."""


class TrainingError(OctavoError):
    """A training run that cannot go on."""


class NonFiniteLossError(TrainingError):
    """The loss became NaN or infinite."""
