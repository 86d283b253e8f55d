"""The device operations that models and the runner are written in, as pure functions with documented shapes.

Letters: `T` tokens of a step, `R` rows of a step, `S` sampled rows, `V` vocabulary, `H` hidden size,
`Hq`/`Hk` query / key-value heads, `D` head size, `N` cache blocks, `B` tokens in a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

LayerCache = tuple[Tensor, Tensor]
"""Keys and values of one layer, each `[N, B, Hk, D]` in the run dtype. Block 0 is never owned and stays zero."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step as the host planned them, on the device."""

    slots: Tensor
    """`[R] int64`: the state slot of each row."""
    starts: Tensor
    """`[R] int64`: the absolute position of the row's first token."""
    lengths: Tensor
    """`[R] int64`: tokens of the row in this step, >= 1."""
    num_tokens: int
    """Sum of the lengths, `T`."""
    max_length: int
    max_context: int
    """Largest start + length."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where each row's queries lie in the step and where its context lies in the cache."""

    query_starts: Tensor
    """`[R + 1] int64`: row r owns tokens `query_starts[r]:query_starts[r + 1]`."""
    context_lens: Tensor
    """`[R] int64`: keys visible to the row's last token, this step's included."""
    block_tables: Tensor
    """`[R, max_blocks] int64`: cache block of each `B` positions; entries past the context are undefined."""
    slot_mapping: Tensor
    """`[T] int64`: `block * B + offset` at which a token's key and value are written; -1 writes nothing."""
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step's forward pass reads, made on the device from device-resident state."""

    token_ids: Tensor
    """`[T] int64`."""
    positions: Tensor
    """`[T] int64`: absolute."""
    attention: AttentionBatch


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of the `S` rows to be sampled, gathered from the slots' tables.

    The `has_*` fields and `num_logprobs` are known on the host, so that unneeded work is never launched.
    """

    tokens: Tensor
    """`[slots, max_len] int32`: the token pool; row `slots[s]` holds prompt and answer in order."""
    slots: Tensor
    """`[S] int64`."""
    prompt_lens: Tensor
    """`[S] int64`."""
    lengths: Tensor
    """`[S] int64`: tokens before the one to be drawn; the output index is `lengths - prompt_lens`."""
    temperature: Tensor
    """`[S] f32`; below 1e-5: greedy."""
    top_k: Tensor
    """`[S] int64`; `V` or more: off."""
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    """`[S] f32` each."""
    seed: Tensor
    """`[S] int64`: the 64 bits of the seed."""
    choice: Tensor
    """`[S] int64`: which of a request's answers."""
    bias_ids: Tensor
    """`[S, E] int64`: tokens whose logits are changed; -1 ends the list."""
    bias_values: Tensor
    """`[S, E] f32`: added; -inf forbids."""
    bias_until: Tensor
    """`[S, E] int64`: the entry holds while the output index is below this."""
    allowed: Tensor
    """`[S, V] bool`, or `[S, 0]` when no row restricts its tokens."""
    has_penalties: bool
    has_bias: bool
    has_filters: bool
    """Some random row uses top-k, top-p or min-p."""
    has_random: bool
    """Some row is not greedy."""
    num_logprobs: int
    """-1: nobody asked; else the largest count asked for (0: of the drawn token alone)."""
    stage: int = 0
    """The stage's number, part of the random counter."""
    max_length: int = 0
    """Largest of `lengths`."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the raw logits at `S` positions."""

    chosen: Tensor
    """`[S] f32`: of the drawn (or given) token."""
    rank: Tensor
    """`[S] int64`: 1 + the number of strictly larger logits."""
    top_ids: Tensor
    """`[S, K] int64`, most probable first; the lowest id first among equals."""
    top: Tensor
    """`[S, K] f32`."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens drawn for `S` rows."""

    token_ids: Tensor
    """`[S] int64`."""
    finite: Tensor
    """`[S] bool`: false where the raw logits hold NaN or +inf, or no token could be drawn; that id means nothing."""
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotation of one model's queries and keys."""

    cos: Tensor
    sin: Tensor
    """`[max_positions, rotary_dim / 2] f32`, with any scaling of the family already in them."""
    rotary_dim: int


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norms of the heads of queries and keys, before the rotation."""

    query: Tensor
    key: Tensor
    """`[D]` each, in the run dtype."""
    eps: float


class Ops(Protocol):
    """One backend. Inputs are never changed, except the cache and the token pool where a method says so."""

    def prepare(self, rows: StepRows, tokens: Tensor, block_tables: Tensor, block_size: int) -> StepInputs:
        """Gather a step's token ids, positions and cache slots.

        `tokens [slots, max_len] int32` and `block_tables [slots, max_blocks] int32` are the device-resident tables.
        """
        ...

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """`[T] int64`, `[V, H]` -> `[T, H]`."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`[T, I]`, `[O, I]`, `[O]` -> `[T, O]`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm of the last axis, computed in float32 (https://arxiv.org/abs/1910.07467)."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`(norm(x + residual), x + residual)`, each `[T, H]`."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """`[T, 2 I]` -> `silu(first half) * second half`, `[T, I]`."""
        ...

    def rotate_and_cache(
        self,
        qkv: Tensor,
        positions: Tensor,
        rotary: Rotary,
        norm: HeadNorm | None,
        cache: LayerCache,
        slot_mapping: Tensor,
        num_heads: int,
    ) -> Tensor:
        """Split `[T, (Hq + 2 Hk) D]`, norm and rotate queries and keys, write keys and values to the cache.

        Returns the queries `[T, Hq, D]`. Changes `cache` at `slot_mapping`.
        """
        ...

    def paged_attention(self, q: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float) -> Tensor:
        """Causal attention of `[T, Hq, D]` over each row's cached context -> `[T, Hq, D]`.

        A row's query i (of n) sees the first `context_len - n + i + 1` keys. Rows may have any lengths.
        """
        ...

    def moe(
        self, x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalise: bool
    ) -> Tensor:
        """Mixture of experts: softmax over `router_logits [T, E]`, the best `top_k` experts, weighted sum.

        `gate_up [E, 2 I, H]`, `down [E, H, I]`; `renormalise` makes the chosen weights sum to 1. Returns `[T, H]`.
        """
        ...

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """Draw one token for each row of `[S, V]` raw logits, as `SamplingParams` describes it."""
        ...

    def logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
        """Log-softmax of raw logits `[S, V]` at the given ids `[S]` and at the `num_top` best."""
        ...


@dataclass(frozen=True, slots=True)
class StepContext:
    """Everything that a model may use in one step."""

    ops: Ops
    inputs: StepInputs
    caches: Sequence[LayerCache]
    """By layer."""
    sampling: SamplingBatch | None
    """`None` when no row of the step is sampled."""
