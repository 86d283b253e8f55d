"""An inference engine for omni-modality models that lives inside an async Python application."""

from omni_async.api import Engine
from omni_async.errors import (
    CaptureError,
    CheckpointError,
    DeadlineExceeded,
    DuplicateRequest,
    EngineClosed,
    EngineNotStarted,
    EngineStateError,
    LoadError,
    NonFiniteLogits,
    OmniError,
    OptionError,
    PromptTooLong,
    QueueFull,
    RequestError,
    StepFailed,
    UnsupportedModel,
)
from omni_async.options import EngineOptions
from omni_async.stage import StageStats
from omni_async.stream import EventStream, TextIterator
from omni_async.types import (
    Completion,
    Event,
    Finished,
    Generation,
    Request,
    SamplingParams,
    TextDelta,
    Timings,
    TokenLogprob,
    Usage,
)

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CheckpointError",
    "Completion",
    "DeadlineExceeded",
    "DuplicateRequest",
    "Engine",
    "EngineClosed",
    "EngineNotStarted",
    "EngineOptions",
    "EngineStateError",
    "Event",
    "EventStream",
    "Finished",
    "Generation",
    "LoadError",
    "NonFiniteLogits",
    "OmniError",
    "OptionError",
    "PromptTooLong",
    "QueueFull",
    "Request",
    "RequestError",
    "SamplingParams",
    "StageStats",
    "StepFailed",
    "TextDelta",
    "TextIterator",
    "Timings",
    "TokenLogprob",
    "UnsupportedModel",
    "Usage",
    "__version__",
]
