"""The exceptions that omni_async raises.

OmniError
|-- RequestError (ValueError)        the request cannot be served as written
|   |-- PromptTooLong                more prompt tokens than the model or its cache can hold
|   `-- DuplicateRequest             a live request already has this id
|-- OptionError (ValueError)         an engine option is illegal or does not fit the machine
|-- CaptureError                     a step cannot be captured as a CUDA graph; names its shape
|-- LoadError                        a checkpoint cannot be loaded; names the file and the tensor
|   |-- CheckpointError              missing, truncated, corrupt, unexpected or misshapen data
|   `-- UnsupportedModel             an architecture, quantisation or file kind that is not built in
|-- QueueFull                        the bounded queue of waiting requests has no place left
|-- DeadlineExceeded (TimeoutError)  the request's `deadline_s` passed before its end
|-- StepFailed                       a step raised; the original exception is `__cause__`
|   `-- NonFiniteLogits              the model produced NaN or infinite logits for this request
`-- EngineStateError (RuntimeError)  the engine is not in the state that the call needs
    |-- EngineNotStarted
    `-- EngineClosed                 closed by its owner, or by a fault (then `__cause__` says which)
"""


class OmniError(Exception):
    """Base of every exception defined by this package."""


class RequestError(OmniError, ValueError):
    """A request that cannot be served as written; the message names the value and the limit."""


class PromptTooLong(RequestError):
    """A prompt that leaves no room for an answer."""

    def __init__(self, num_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"the prompt has {num_tokens} tokens; max_model_len is {max_model_len}, and the answer needs one of them"
        )


class DuplicateRequest(RequestError):
    """A request id that a live request already has."""


class OptionError(OmniError, ValueError):
    """An engine option that is illegal or that this machine cannot satisfy."""


class CaptureError(OmniError):
    """A step that cannot be captured as a CUDA graph when an engine starts."""


class LoadError(OmniError):
    """A checkpoint that cannot be loaded."""


class CheckpointError(LoadError):
    """Missing, truncated, corrupt, unexpected or misshapen checkpoint data."""


class UnsupportedModel(LoadError):
    """An architecture, quantisation or file kind that is not built in."""


class QueueFull(OmniError):
    """The bounded queue of waiting requests has no place left."""


class DeadlineExceeded(OmniError, TimeoutError):
    """The deadline of a request passed before its end."""


class StepFailed(OmniError):
    """A step raised; the requests of that step end with this, the original exception chained."""


class NonFiniteLogits(StepFailed):
    """The model produced NaN or infinite logits for this request."""


class EngineStateError(OmniError, RuntimeError):
    """The engine is not in the state that the call needs."""


class EngineNotStarted(EngineStateError):
    """The engine has not been entered with `async with` yet."""


class EngineClosed(EngineStateError):
    """The engine was closed, by its owner or by a fault."""
