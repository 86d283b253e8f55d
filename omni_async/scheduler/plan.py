"""What the scheduler hands the runner for one step, and what comes back. Pure data, no torch."""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple

from omni_async.sampling.logprobs import HostLogprobs
from omni_async.sampling.params import SamplingNeeds
from omni_async.scheduler.sequence import Sequence
from omni_async.types import FinishReason


class Phase(Enum):
    """What a row does; stated, never guessed from a length."""

    PREFILL = "prefill"
    DECODE = "decode"


class Row(NamedTuple):
    """One sequence's part of a step."""

    sequence: Sequence
    slot: int
    start: int
    """Absolute position of the first token."""
    length: int
    phase: Phase
    samples: bool
    """The row's last token is the sequence's last: the next one is drawn."""


quick_row = partial(tuple.__new__, Row)
"""`Row` from a tuple of its fields, in half the time: one is made for every token drawn."""


class NewBlocks(NamedTuple):
    """Cache blocks that a slot gained for this step."""

    slot: int
    first: int
    """Index of the first of them in the slot's block table."""
    blocks: tuple[int, ...]


class Admission(NamedTuple):
    """A sequence that takes a slot in this step; its known tokens and parameters go to the device."""

    slot: int
    sequence: Sequence
    tokens: "array[int]"
    """A copy of the known tokens: the prompt, and what was generated before a preemption."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: immutable, made by `Scheduler.plan`, run by the runner, ended by `Scheduler.commit`."""

    step_id: int
    rows: tuple[Row, ...]
    num_tokens: int
    admissions: tuple[Admission, ...]
    new_blocks: tuple[NewBlocks, ...]
    needs: SamplingNeeds
    num_logprobs: int
    """-1: no sampled row asked; else the largest count."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced, on the host."""

    plan: StepPlan
    token_ids: list[int]
    """One for each sampled row, in row order."""
    finite: list[bool]
    logprobs: HostLogprobs | None = None
    prompt_logprobs: dict[int, HostLogprobs] = field(default_factory=dict)
    """By row index: of the tokens at positions `start + 1 .. start + length` that the prompt holds."""
    error: BaseException | None = None
    """The step failed; nothing else here means anything."""


class Update(NamedTuple):
    """What a committed step means for one sequence."""

    sequence: Sequence
    token_id: int
    """-1: none."""
    text: str
    logprobs: HostLogprobs | None
    """The step's, of all its sampled rows."""
    draw: int
    """This sequence's entry among the step's sampled rows, -1: none."""
    reason: FinishReason | None
    stop_reason: int | str | None
    error: BaseException | None


quick_update = partial(tuple.__new__, Update)
"""`Update` from a tuple of its fields; see `quick_row`."""
