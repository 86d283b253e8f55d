"""The sampling parameters of all slots, as callers hand them over and as kernels read them."""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """One row of parameters per slot, on the device; the one-dimensional tensors may be views of one common stride."""

    temperature: Tensor
    """`[slots] f32`; below 1e-5: greedy."""
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    """`[slots] f32` each."""
    top_k: Tensor
    """`[slots] int32`, at least 1; `V` or more: off."""
    seed_low: Tensor
    seed_high: Tensor
    """`[slots] int32` each: the two halves of the seed."""
    choice: Tensor
    """`[slots] int32`: which of a request's answers."""
    prompt_len: Tensor
    """`[slots] int32`: the output index is the number of known tokens less this."""
    num_bias: Tensor
    """`[slots] int32`: valid entries of the three lists below."""
    restricted: Tensor
    """`[slots] int32`: 1 if `allowed` holds for the slot."""
    num_logprobs: Tensor
    """`[slots] int32`: -1: none; 0: the drawn token's; n: those of the best n tokens too."""
    bias_ids: Tensor
    """`[slots, E] int32`: an id may occur again, values add up."""
    bias_until: Tensor
    """`[slots, E] int32`: the entry holds while the output index is below this."""
    bias_values: Tensor
    """`[slots, E] f32`: added; -inf forbids."""
    allowed: Tensor
    """`[slots, ceil(V / 32)] int32`: bit `t % 32` of word `t // 32` is set where token t may be drawn."""
    stage: int = 0
    """Part of the random counter."""


class TableArguments(NamedTuple):
    """`SamplingTables` as an argument of a kernel: pointers and strides."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    top_k: Tensor
    seed_low: Tensor
    seed_high: Tensor
    choice: Tensor
    prompt_len: Tensor
    num_bias: Tensor
    restricted: Tensor
    num_logprobs: Tensor
    bias_ids: Tensor
    bias_until: Tensor
    bias_values: Tensor
    allowed: Tensor
    stride: int
    bias_stride: int
    allowed_stride: int


def table_arguments(tables: SamplingTables) -> TableArguments:
    """The argument for kernels."""
    return TableArguments(
        tables.temperature,
        tables.top_p,
        tables.min_p,
        tables.repetition_penalty,
        tables.presence_penalty,
        tables.frequency_penalty,
        tables.top_k,
        tables.seed_low,
        tables.seed_high,
        tables.choice,
        tables.prompt_len,
        tables.num_bias,
        tables.restricted,
        tables.num_logprobs,
        tables.bias_ids,
        tables.bias_until,
        tables.bias_values,
        tables.allowed,
        tables.temperature.stride(0),
        tables.bias_ids.stride(0),
        tables.allowed.stride(0),
    )


@triton.jit
def changes_tokens(tables, slot):
    """Whether a slot has biases or penalties."""
    at = slot * tables.stride
    repetition = tl.load(tables.repetition_penalty + at) != 1.0
    counted = (tl.load(tables.presence_penalty + at) != 0.0) | (tl.load(tables.frequency_penalty + at) != 0.0)
    return (tl.load(tables.num_bias + at) > 0) | repetition | counted
