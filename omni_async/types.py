"""What callers hand in (`Request`, `SamplingParams`) and what they get back (events, results). No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from omni_async.errors import RequestError

FinishReason = Literal["stop", "length", "abort"]
Message = Mapping[str, object]

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy."""

MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
MAX_BIAS_ENTRIES = 1024
"""Limits of one request, so that one call cannot multiply the work of an engine without bound."""


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    # An integer is always finite, and may be too large to be asked as a float.
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))):
        raise RequestError(f"{name} must be a finite number, got {value!r}")
    if value > high or value < low or (open_low and value == low):
        raise RequestError(f"{name} must be {'>' if open_low else '>='} {low:g} and <= {high:g}, got {value!r}")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}")
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, got {value}")


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, got {value!r}")


def _token_ids(name: str, ids: object) -> tuple[int, ...]:
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence | frozenset | set):
        raise RequestError(f"{name} must be a sequence of token ids, got {type(ids).__name__}")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise RequestError(f"{name} holds {token!r}, which is not a token id")
    return tuple(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one stage are chosen; `None` means the checkpoint's own default.

    Order of the steps: allowed ids and minimum length, logit bias, penalties, temperature, top-k,
    top-p, min-p, then one draw by Gumbel-max. Log-probabilities are those of the raw logits.

    Raises:
        RequestError: a value is illegal; the message names the field, the value and the limit.
    """

    temperature: float | None = None
    """>= 0; below 1e-5 the most probable token is taken, the lowest id among equals."""
    top_k: int | None = None
    """-1, 0 or at least the vocabulary's size: disabled."""
    top_p: float | None = None
    """0 < top_p <= 1."""
    min_p: float | None = None
    """0 <= min_p <= 1: tokens less probable than this share of the best one are dropped."""
    repetition_penalty: float | None = None
    """1e-4 .. 1e4; 1 is off; applies to tokens of the prompt and of the answer."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """-2 .. 2; apply to tokens of the answer only."""
    seed: int | None = None
    """Equal seeds give equal tokens whatever else is in the batch; `None` draws a fresh seed."""
    max_tokens: int | None = None
    """>= 1; `None`: as many as the model's length allows."""
    min_tokens: int = 0
    """End marks and stop ids cannot be drawn before this many tokens."""
    stop: str | Sequence[str] = ()
    """Texts that end the answer."""
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    """0: of the chosen token; k: also of the k best; -1: of the whole vocabulary."""
    prompt_logprobs: int | None = None
    n: int = 1
    """Number of answers; answer i draws as (seed, i)."""

    def __post_init__(self) -> None:
        def replace(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if self.temperature is not None:
            _number("temperature", self.temperature, 0, 1e4)
        if self.top_k is not None:
            _integer("top_k", self.top_k, -1, 2**31 - 1)
        if self.top_p is not None:
            _number("top_p", self.top_p, 0, 1, open_low=True)
        if self.min_p is not None:
            _number("min_p", self.min_p, 0, 1)
        if self.repetition_penalty is not None:
            _number("repetition_penalty", self.repetition_penalty, 1e-4, 1e4)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        replace("stop", self._stops())
        replace("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        _flag("include_stop_str_in_output", self.include_stop_str_in_output)
        _flag("ignore_eos", self.ignore_eos)
        _flag("skip_special_tokens", self.skip_special_tokens)
        replace("logit_bias", self._bias())
        if self.allowed_token_ids is not None:
            replace("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty: no token could ever be drawn")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _integer(name, count, -1, 2**31 - 1)
        _integer("n", self.n, 1, MAX_CHOICES)

    def _stops(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if isinstance(stops, bytes) or not isinstance(stops, Sequence):
            raise RequestError(f"stop must be a string or a sequence of strings, got {stops!r}")
        for text in stops:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop holds {text!r}; every stop must be a non-empty string")
            if len(text) > MAX_STOP_CHARS:
                raise RequestError(f"a stop string of {len(text)} characters is above the limit of {MAX_STOP_CHARS}")
        if len(stops) > MAX_STOP_STRINGS:
            raise RequestError(f"{len(stops)} stop strings are above the limit of {MAX_STOP_STRINGS}")
        return tuple(stops)

    def _bias(self) -> dict[int, float]:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        if len(self.logit_bias) > MAX_BIAS_ENTRIES:
            raise RequestError(f"logit_bias has {len(self.logit_bias)} entries; the limit is {MAX_BIAS_ENTRIES}")
        for token, bias in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise RequestError(f"logit_bias holds {token!r}, which is not a token id")
            _number(f"logit_bias[{token}]", bias, -1e4, 1e4)
        return {token: float(bias) for token, bias in self.logit_bias.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One question to an engine: exactly one of `prompt`, `prompt_token_ids` and `messages`.

    Raises:
        RequestError: a field is illegal, or not exactly one kind of prompt is given.
    """

    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    messages: Sequence[Message] | None = None
    """Chat turns, `{"role": ..., "content": ...}`, put through the checkpoint's chat template."""
    sampling: SamplingParams | Mapping[str, SamplingParams] | None = None
    """For the first stage, or by stage name."""
    outputs: frozenset[str] | set[str] = frozenset({"text"})
    request_id: str | None = None
    """Unique among live requests; `None` makes one."""
    priority: int = 0
    """Lower runs earlier; among equals, first come, first served."""
    deadline_s: float | None = None
    """Seconds from submission after which the request fails with `DeadlineExceeded`."""

    def __post_init__(self) -> None:
        kinds = {"prompt": self.prompt, "prompt_token_ids": self.prompt_token_ids, "messages": self.messages}
        given = [name for name, value in kinds.items() if value is not None]
        if len(given) != 1:
            raise RequestError(
                "a request needs exactly one of prompt, prompt_token_ids and messages; "
                + (f"got {' and '.join(given)}" if given else "got none")
            )
        if self.prompt is not None and not isinstance(self.prompt, str):
            raise RequestError(f"prompt must be a string, got {type(self.prompt).__name__}")
        if self.prompt_token_ids is not None:
            ids = self.prompt_token_ids
            if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
                raise RequestError(f"prompt_token_ids must be a sequence of integers, got {type(ids).__name__}")
            # A copy: the request is prepared later, on another thread, while its maker may go on changing the list.
            object.__setattr__(self, "prompt_token_ids", tuple(ids))
        if self.messages is not None:
            self._check_messages(self.messages)
            object.__setattr__(self, "messages", tuple([dict(message) for message in self.messages]))
        if self.sampling is not None and not isinstance(self.sampling, SamplingParams):
            if not isinstance(self.sampling, Mapping):
                raise RequestError(f"sampling must be SamplingParams or a mapping of them, got {self.sampling!r}")
            for stage, params in self.sampling.items():
                if not isinstance(stage, str) or not isinstance(params, SamplingParams):
                    raise RequestError(f"sampling[{stage!r}] must be SamplingParams, got {params!r}")
        if isinstance(self.outputs, str) or not isinstance(self.outputs, set | frozenset | tuple | list):
            raise RequestError(f"outputs must be a set of names such as {{'text'}}, got {self.outputs!r}")
        if not self.outputs or not all(isinstance(name, str) for name in self.outputs):
            raise RequestError(f"outputs must name at least one output, got {self.outputs!r}")
        object.__setattr__(self, "outputs", frozenset(self.outputs))
        if self.request_id is not None and (not isinstance(self.request_id, str) or not self.request_id):
            raise RequestError(f"request_id must be a non-empty string, got {self.request_id!r}")
        _integer("priority", self.priority, -(2**31), 2**31 - 1)
        if self.deadline_s is not None:
            _number("deadline_s", self.deadline_s, 0, 1e9, open_low=True)

    @staticmethod
    def _check_messages(messages: object) -> None:
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
            raise RequestError(f"messages must be a sequence of mappings, got {type(messages).__name__}")
        if not messages:
            raise RequestError("messages is empty; at least one turn is needed")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(f"messages[{i}] must be a mapping with a 'role', got {message!r}")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token at one position, from the raw logits."""

    token_id: int
    logprob: float
    rank: int
    """1 + the number of strictly larger logits."""
    bytes: bytes
    """The UTF-8 bytes that the token stands for, possibly a part of a character."""
    top: tuple["TokenLogprob", ...] = ()
    """The most probable tokens, best first, as many as were asked for."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request, or of one of its answers."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """When things happened, in seconds since the request was submitted."""

    admitted_s: float | None
    """A slot was given; before that the request was prepared and waited in the queue. `None`: it never was."""
    first_token_s: float | None
    finished_s: float
    completion_tokens: int

    @property
    def inter_token_s(self) -> float:
        """Mean time between tokens after the first; 0 for fewer than two tokens."""
        if self.first_token_s is None or self.completion_tokens < 2:
            return 0.0
        return (self.finished_s - self.first_token_s) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The tokens that one answer gained since its last delta, and the text that they completed."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One entry for each token id, if asked for."""
    index: int = 0
    """Which of the request's `n` answers."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one answer; the last of these ends the stream."""

    reason: FinishReason
    stop_reason: int | str | None
    """The stop id or the stop string that ended it; `None` for the end mark and other reasons."""
    usage: Usage
    timings: Timings
    index: int = 0
    reasons: Mapping[str, FinishReason] = field(default_factory=dict)
    """By output name."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One entry for each prompt token, `None` for the first; none if the request was aborted before they were known."""


Event = TextDelta | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """One collected answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finished: Finished

    @property
    def reason(self) -> FinishReason:
        """Why it ended."""
        return self.finished.reason


@dataclass(frozen=True, slots=True)
class Generation:
    """Everything that a request produced, as `Engine.generate` returns it."""

    request_id: str
    completions: tuple[Completion, ...]
    """By index; the properties below speak of the first."""
    usage: Usage
    """The prompt once, the completions summed."""

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first answer's token ids."""
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """The first answer's log-probabilities."""
        return self.completions[0].logprobs

    @property
    def reason(self) -> FinishReason:
        """Why the first answer ended."""
        return self.completions[0].finished.reason

    @property
    def stop_reason(self) -> int | str | None:
        """What stopped the first answer."""
        return self.completions[0].finished.stop_reason

    @property
    def timings(self) -> Timings:
        """The first answer's timings."""
        return self.completions[0].finished.timings
