"""From what a caller asks for to what a row of the sampler is given. No torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple, Protocol

from omni_async.errors import RequestError
from omni_async.types import GREEDY_TEMPERATURE, SamplingParams

NO_TOP_K = 2**31 - 1
FOREVER = 2**31 - 1
"""An output index that no answer reaches."""
MAX_BIAS = 1024
"""Tokens whose logits one request may change; devices keep a list of this size for each answer under way."""


class SamplingNeeds(IntFlag):
    """What the sampled rows of a step need; the union decides what is launched."""

    NONE = 0
    RANDOM = 1
    FILTERS = 2
    PENALTIES = 4
    BIAS = 8
    ALLOWED = 16


class SamplingDefaults(Protocol):
    """A checkpoint's own parameters, used where a request leaves them open."""

    @property
    def temperature(self) -> float:
        """See `SamplingParams`; so are the others."""
        ...

    @property
    def top_k(self) -> int: ...  # noqa: D102

    @property
    def top_p(self) -> float: ...  # noqa: D102

    @property
    def min_p(self) -> float: ...  # noqa: D102

    @property
    def repetition_penalty(self) -> float: ...  # noqa: D102


class BiasEntry(NamedTuple):
    """A change of one token's logit."""

    token_id: int
    value: float
    """Added; -inf forbids the token."""
    until: int
    """The entry holds while the output index is below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParams:
    """The parameters of one answer, with nothing left open."""

    temperature: float
    """0: greedy."""
    top_k: int
    """`NO_TOP_K`: off."""
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    """-2**63 .. 2**63 - 1: the seed's 64 bits."""
    choice: int
    prompt_len: int
    bias: tuple[BiasEntry, ...]
    allowed: tuple[int, ...] | None
    num_logprobs: int
    """-1: none; 0: of the drawn token alone; n: of the best n tokens too."""


def count_logprobs(wanted: int | None, vocab_size: int) -> int:
    """A request's count of log-probabilities as a number: -1 for none, the vocabulary's size for all."""
    if wanted is None:
        return -1
    return vocab_size if wanted == -1 else wanted


def check(params: SamplingParams, vocab_size: int) -> None:
    """See that parameters fit a vocabulary.

    Raises:
        RequestError: an id outside the vocabulary, or more log-probabilities than it has tokens.
    """
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            raise RequestError(f"{name} is {count}; the vocabulary holds {vocab_size} tokens")


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"{name} holds {token}; the vocabulary holds 0 to {vocab_size - 1}")


def resolve(
    params: SamplingParams,
    defaults: SamplingDefaults,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    prompt_len: int,
    seed: int,
    choice: int,
) -> RowParams:
    """Fill in a checkpoint's defaults; `params` have passed `check`. `seed` is any 64-bit number, signed or not.

    Raises:
        RequestError: every token that may be drawn is forbidden by `min_tokens`, or there are too many biases.
    """

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    temperature = given(params.temperature, defaults.temperature)
    top_k = params.top_k if params.top_k is not None else defaults.top_k
    bias = [BiasEntry(token, value, FOREVER) for token, value in params.logit_bias.items() if value]
    if params.min_tokens:
        ends = {token for token in (*eos_token_ids, *params.stop_token_ids) if token < vocab_size}
        allowed = params.allowed_token_ids
        if len(ends) == vocab_size or (allowed is not None and ends.issuperset(allowed)):
            raise RequestError(
                f"min_tokens is {params.min_tokens}, but each token that may be drawn ends the answer: none is left"
            )
        bias += [BiasEntry(token, float("-inf"), params.min_tokens) for token in sorted(ends)]
    if len(bias) > MAX_BIAS:
        raise RequestError(
            f"logit_bias and the ends that min_tokens forbids are {len(bias)} entries; the limit is {MAX_BIAS}"
        )
    return RowParams(
        temperature=temperature if temperature >= GREEDY_TEMPERATURE else 0.0,
        top_k=top_k if 0 < top_k < vocab_size else NO_TOP_K,
        top_p=given(params.top_p, defaults.top_p),
        min_p=given(params.min_p, defaults.min_p),
        repetition_penalty=given(params.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=(seed + 2**63) % 2**64 - 2**63,
        choice=choice,
        prompt_len=prompt_len,
        bias=tuple(bias),
        allowed=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
        num_logprobs=count_logprobs(params.logprobs, vocab_size),
    )


def needs(row: RowParams) -> SamplingNeeds:
    """Which parts of the sampler a row makes use of."""
    wanted = SamplingNeeds.NONE
    if row.temperature >= GREEDY_TEMPERATURE:
        wanted |= SamplingNeeds.RANDOM
        if row.top_k != NO_TOP_K or row.top_p < 1 or row.min_p > 0:
            wanted |= SamplingNeeds.FILTERS
    if row.repetition_penalty != 1 or row.presence_penalty or row.frequency_penalty:
        wanted |= SamplingNeeds.PENALTIES
    if row.bias:
        wanted |= SamplingNeeds.BIAS
    if row.allowed is not None:
        wanted |= SamplingNeeds.ALLOWED
    return wanted
