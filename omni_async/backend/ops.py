"""The device operations that models and the runner are written in, as pure functions with documented shapes.

Letters: `T` tokens of a step, `R` rows of a step, `S` sampled rows, `V` vocabulary, `H` hidden size,
`Hq`/`Hk` query / key-value heads, `D` head size, `N` cache blocks, `B` tokens in a block.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from omni_async.sampling.params import SamplingNeeds

LayerCache = tuple[Tensor, Tensor]
"""Keys and values of one layer, each `[N, B, Hk, D]`. Block 0 is never owned and stays zero.

In the run dtype or in float8_e4m3fn, where magnitudes beyond 448 are written as 448. Queries see keys and values as
they are stored, those of their own step too, so that results do not depend on how a prompt is cut into steps.
"""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step as the host planned them, on the device. Padding: slot -1 and no tokens; sampled row -1."""

    slots: Tensor
    """`[R] int32`: the state slot of each row."""
    starts: Tensor
    """`[R] int32`: the absolute position of the row's first token."""
    query_starts: Tensor
    """`[R + 1] int32`: row r owns the step's tokens `query_starts[r]:query_starts[r + 1]`."""
    new_places: Tensor
    """`[R] int32`: where in its block table the row gains a block, -1: nowhere."""
    new_blocks: Tensor
    """`[R] int32`: that block."""
    sampled: Tensor
    """`[S] int32`: the rows that draw a token."""
    num_tokens: int
    """`T`; those from `query_starts[R]` on are padding."""
    single: bool
    """No row has more than one token."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where each row's queries lie in the step and where its context lies in the cache."""

    slots: Tensor
    """`[R] int64`: each row's line in `block_tables`; -1 is padding, a row without tokens."""
    query_starts: Tensor
    """`[R + 1] int64`: row r owns tokens `query_starts[r]:query_starts[r + 1]`."""
    context_lens: Tensor
    """`[R] int64`: keys visible to the row's last token, this step's included."""
    block_tables: Tensor
    """`[slots, max_blocks] int32`: cache block of each `B` positions; entries past a row's context hold anything."""
    slot_mapping: Tensor
    """`[T] int64`: `block * B + offset` at which a token's key and value are written; -1 writes nothing."""
    single: bool
    """No row has more than one token."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step reads, made on the device from device-resident state."""

    token_ids: Tensor
    """`[T] int64`; 0 for padding."""
    positions: Tensor
    """`[T] int64`: absolute; 0 for padding. For a rotary with axes they may be `[A, T]`."""
    attention: AttentionBatch
    sampled_tokens: Tensor
    """`[S] int64`: the place in the step of each sampled row's last token; 0 for padding."""
    sampled_slots: Tensor
    """`[S] int64`; -1 for padding."""
    sampled_lengths: Tensor
    """`[S] int64`: tokens before the one to be drawn; 0 for padding."""


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """The sampling parameters of all slots."""

    temperature: Tensor
    """`[slots] f32`; below 1e-5: greedy."""
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    """`[slots] f32` each."""
    top_k: Tensor
    """`[slots] int32`; `V` or more: off."""
    seed_low: Tensor
    seed_high: Tensor
    """`[slots] int32` each: the two halves of the seed."""
    choice: Tensor
    """`[slots] int32`: which of a request's answers."""
    prompt_lens: Tensor
    """`[slots] int32`: the output index is the number of known tokens less this."""
    num_bias: Tensor
    """`[slots] int32`: valid entries of the three lists below."""
    restricted: Tensor
    """`[slots] int32`: 1 if `allowed` holds for the slot."""
    num_logprobs: Tensor
    """`[slots] int32`: -1: none; 0: the drawn token's; n: those of the best n tokens too."""
    bias_ids: Tensor
    """`[slots, E] int32`: tokens whose logits are changed; an id may occur again."""
    bias_until: Tensor
    """`[slots, E] int32`: the entry holds while the output index is below this."""
    bias_values: Tensor
    """`[slots, E] f32`: added; -inf forbids."""
    allowed: Tensor
    """`[slots, ceil(V / 32)] int32`: bit `t % 32` of word `t // 32` is set where token t may be drawn."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The `S` rows of a step that draw a token.

    `needs` and `num_logprobs` are known on the host, for backends that choose there what to launch; a backend may also
    look at each row's parameters on the device.
    """

    tables: SamplingTables
    tokens: Tensor
    """`[slots, max_len] int32`: the token pool; line `slots[s]` holds prompt and answer in order."""
    slots: Tensor
    """`[S] int64`; -1 is padding."""
    lengths: Tensor
    """`[S] int64`: tokens before the one to be drawn."""
    needs: SamplingNeeds
    """What some row makes use of."""
    num_logprobs: int
    """-1: nobody asked; else the largest count asked for (0: of the drawn token alone)."""
    stage: int = 0
    """The stage's number, part of the random counter."""


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
    axes: Tensor | None = None
    """`[rotary_dim / 2] int32`: which row of positions `[A, T]` turns each pair; positions `[T]` turn all of them."""


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norms of the heads of queries and keys, before the rotation."""

    query: Tensor
    key: Tensor
    """`[D]` each, in the run dtype."""
    eps: float


class Ops(Protocol):
    """One backend. Inputs are never changed, except where a method says so: the cache, the token pool, a residual."""

    @property
    def capturable(self) -> bool:
        """Whether a step makes no host decision that depends on device data, so that a CUDA graph can hold it."""
        ...

    def compiling(self) -> AbstractContextManager[object]:
        """In this context operations need not compute: their kernels get ready, and results are undefined."""
        ...

    def prepare(self, rows: StepRows, tokens: Tensor, block_tables: Tensor, block_size: int) -> StepInputs:
        """Gather a step's token ids, positions and cache slots; first enter the rows' new blocks into `block_tables`.

        A token whose block is 0 writes nothing: nobody owns that block.
        `tokens [slots, max_len] int32` and `block_tables [slots, max_blocks] int32` are the device-resident tables.
        """
        ...

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """`[T] int64`, `[V, H]` -> `[T, H]`."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """`x W^T + bias + residual`: `[T, I]`, `[O, I]`, `[O]`, `[T, O]` -> `[T, O]`.

        The product is rounded to the run dtype before the residual is added, or only the sum is. The residual is given
        away: the result may take its memory.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm of the last axis, computed in float32 (https://arxiv.org/abs/1910.07467)."""
        ...

    def norm_linear(
        self,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        *,
        gated: bool,
    ) -> Tensor:
        """`linear(rms_norm(x))`: `[T, H]`, `[O, H]` -> `[T, O]`; `gated`: `silu_and_mul` of that, `[T, O / 2]`."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """`[T, 2 I]` -> `silu(first half) * second half`, `[T, I]`."""
        ...

    def attention(
        self,
        qkv: Tensor,
        positions: Tensor,
        rotary: Rotary,
        norm: HeadNorm | None,
        cache: LayerCache,
        batch: AttentionBatch,
        num_heads: int,
        scale: float,
    ) -> Tensor:
        """Split `[T, (Hq + 2 Hk) D]`, norm and rotate queries and keys, write the cache, attend -> `[T, Hq, D]`.

        Changes `cache` at `batch.slot_mapping`. A row's query i (of n) sees the first `context_len - n + i + 1` keys of
        its row. Rows may have any lengths. The result's tokens that belong to no row mean nothing.
        """
        ...

    def moe(
        self,
        x: Tensor,
        router_logits: Tensor,
        gate_up: Tensor,
        down: Tensor,
        top_k: int,
        renormalise: bool,
        residual: Tensor,
    ) -> Tensor:
        """Mixture of experts: softmax over `router_logits [T, E]`, the best `top_k`, weighted sum, plus `residual`.

        `x [T, H]`, `gate_up [E, 2 I, H]`, `down [E, H, I]`, `residual [T, H]`; `renormalise` makes the chosen weights
        sum to 1. The weighted sum is rounded before the residual is added. Returns `[T, H]`.
        """
        ...

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """Draw one token for each row of `[S, V]` raw logits, as `SamplingParams` describes it."""
        ...

    def append(self, drawn: Sampled, batch: SamplingBatch) -> Tensor:
        """Write the drawn tokens to the token pool, each behind the tokens of its row.

        Returns `[S] int32` for the host: the ids, -1 where the draw was not finite (there 0 is written).
        """
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
