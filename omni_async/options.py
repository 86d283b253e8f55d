"""The options of an engine, validated before anything is loaded."""

from dataclasses import dataclass
from typing import Literal, TypedDict

from omni_async.errors import OptionError

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "float16", "bfloat16"]
CacheDtype = Literal["auto", "float8_e4m3"]
Backend = Literal["auto", "reference", "triton"]
LoadFormat = Literal["auto", "random"]

STEP_TOKENS_ON_CPU = 512
STEP_TOKENS_ON_CUDA = 2048


class OptionFields(TypedDict, total=False):
    """The keyword arguments of `Engine.from_pretrained`: the fields of `EngineOptions`."""

    device: Device
    dtype: Dtype | None
    cache_dtype: CacheDtype
    backend: Backend
    load_format: LoadFormat
    max_model_len: int | None
    max_slots: int
    max_step_tokens: int | None
    block_size: int
    num_blocks: int | None
    cache_memory: int | None
    prefix_caching: bool
    pipelined: bool
    capture: bool
    max_waiting: int
    max_unread_tokens: int
    threads: int | None
    progress: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine runs.

    Raises:
        OptionError: a value is illegal; the message names it and the limit.
    """

    device: Device = "auto"
    """`auto`: cuda where there is one, else cpu."""
    dtype: Dtype | None = None
    """The run dtype; `None`: the checkpoint's own (float32 for a quantised file on the CPU)."""
    cache_dtype: CacheDtype = "auto"
    """What keys and values are kept in; `auto`: the run dtype.

    `float8_e4m3`: as many bytes hold twice as many tokens as in 16 bits. Each value is rounded to 4 significant bits
    without scales, magnitudes beyond 448 to 448, those below 0.001 to 0. So answers change, most of all those of models
    whose keys have outliers: measure it with yours."""
    backend: Backend = "auto"
    """Who computes: `reference` is plain torch; `triton`, for cuda, has kernels of our own; `auto`: by the device."""
    load_format: LoadFormat = "auto"
    """`random`: weights are drawn, always the same ones, and a folder needs no more than a config.json."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer together; `None`: what the model and the cache allow."""
    max_slots: int = 32
    """Most answers under way at once."""
    max_step_tokens: int | None = None
    """Most tokens computed in one step: longer prompts are computed in chunks beside the others' decoding.

    `None`: 512 on the CPU, 2048 on cuda, `max_slots` if that is more."""
    block_size: int = 16
    """Tokens in one cache block."""
    num_blocks: int | None = None
    """Cache blocks; `None`: as many as `cache_memory` holds."""
    cache_memory: int | None = None
    """Bytes for the cache; `None`: what all slots can fill, if there is as much.

    At most a quarter of the free memory; on cuda nine tenths of what the largest step leaves."""
    prefix_caching: bool = True
    """Share the cache blocks of equal prompt starts."""
    pipelined: bool = True
    """Launch the next step before the last one's tokens are known; off: one after another, for tests."""
    capture: bool = True
    """On cuda, capture steps as graphs at the start, and replay them; off: the host launches every operation."""
    max_waiting: int = 1024
    """Most answers that may wait for a slot; more are refused with `QueueFull`."""
    max_unread_tokens: int = 1024
    """A request is held back while its caller has this many tokens unread."""
    threads: int | None = None
    """CPU threads of torch, a setting of the whole process; `None` leaves it alone."""
    progress: bool = True
    """Show a bar while loading, if stderr is a terminal."""

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise OptionError(f"device must be 'auto', 'cpu' or 'cuda', got {self.device!r}")
        if self.backend not in ("auto", "reference", "triton"):
            raise OptionError(f"backend must be 'auto', 'reference' or 'triton', got {self.backend!r}")
        if self.dtype not in (None, "float32", "float16", "bfloat16"):
            raise OptionError(f"dtype must be 'float32', 'float16', 'bfloat16' or None, got {self.dtype!r}")
        if self.cache_dtype not in ("auto", "float8_e4m3"):
            raise OptionError(f"cache_dtype must be 'auto' or 'float8_e4m3', got {self.cache_dtype!r}")
        if self.load_format not in ("auto", "random"):
            raise OptionError(f"load_format must be 'auto' or 'random', got {self.load_format!r}")
        for name, value, low, high in (
            ("max_model_len", self.max_model_len, 2, 2**24),
            ("max_slots", self.max_slots, 1, 4096),
            ("max_step_tokens", self.max_step_tokens, 1, 2**20),
            ("block_size", self.block_size, 1, 4096),
            ("num_blocks", self.num_blocks, 1, 2**30),
            ("cache_memory", self.cache_memory, 1, 2**50),
            ("max_waiting", self.max_waiting, 0, 2**20),
            ("max_unread_tokens", self.max_unread_tokens, 1, 2**24),
            ("threads", self.threads, 1, 1024),
        ):
            if value is None and name in ("max_model_len", "max_step_tokens", "num_blocks", "cache_memory", "threads"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise OptionError(f"{name} must be an integer from {low} to {high}, got {value!r}")
        for name, flag in (
            ("prefix_caching", self.prefix_caching),
            ("pipelined", self.pipelined),
            ("capture", self.capture),
            ("progress", self.progress),
        ):
            if not isinstance(flag, bool):
                raise OptionError(f"{name} must be True or False, got {flag!r}")
        if self.max_step_tokens is not None and self.max_step_tokens < self.max_slots:
            raise OptionError(
                f"max_step_tokens ({self.max_step_tokens}) is below max_slots ({self.max_slots}): "
                "each answer under way needs a token of every step"
            )

    def step_tokens(self, device_type: str) -> int:
        """`max_step_tokens`, or what it is for this kind of device."""
        if self.max_step_tokens is not None:
            return self.max_step_tokens
        return max(STEP_TOKENS_ON_CUDA if device_type == "cuda" else STEP_TOKENS_ON_CPU, self.max_slots)
