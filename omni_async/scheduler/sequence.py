"""One answer under way, as the scheduler sees it. No torch."""

from array import array
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from omni_async.sampling.logprobs import HostLogprobs
from omni_async.sampling.params import RowParams, SamplingNeeds

if TYPE_CHECKING:
    from omni_async.text import TextStream


class State(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    """In the queue, owning nothing."""
    RUNNING = "running"
    """Owns a slot and blocks."""
    PREEMPTED = "preempted"
    """Gives its slot and blocks back at the commit of the last plan that names it, then waits again."""
    ENDED = "ended"
    """Will never be planned again; owns its slot and blocks until the last plan that names it commits."""


class CreditSource(Protocol):
    """Where a sequence's tokens go; it withholds credit while nobody takes them."""

    def room(self, pending: int) -> int:
        """How many tokens may still be drawn, `pending` of them being under way already."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """When a sequence ends."""

    token_ids: frozenset[int]
    """Stop ids of the request."""
    end_ids: frozenset[int]
    """The checkpoint's end marks; empty when they are ignored."""
    max_length: int
    """Prompt and answer together."""


class Sequence:
    """One answer to one request; all fields belong to the scheduler's thread.

    `tokens` holds what is known on the host; `num_pending` further tokens are being drawn on the device.
    """

    __slots__ = (
        "admission_len",
        "block_hashes",
        "blocks",
        "credit",
        "held",
        "leader",
        "needs",
        "num_cached",
        "num_computed",
        "num_in_flight",
        "num_logprobs",
        "num_pending",
        "num_planned",
        "num_prompt_logprobs",
        "outlet",
        "params",
        "prompt_len",
        "prompt_logprobs",
        "rank",
        "slot",
        "state",
        "stop",
        "text",
        "tokens",
    )

    def __init__(
        self,
        prompt: TokenIds[int],
        *,
        rank: tuple[int, ...],
        stop: StopRule,
        outlet: CreditSource,
        params: RowParams | None = None,
        needs: SamplingNeeds = SamplingNeeds.NONE,
        num_logprobs: int = -1,
        num_prompt_logprobs: int = -1,
        block_hashes: TokenIds[bytes] = (),
        text: "TextStream | None" = None,
        leader: "Sequence | None" = None,
    ) -> None:
        self.tokens = array("i", prompt)
        self.prompt_len = len(self.tokens)
        self.rank = rank
        """(priority, order of arrival, answer); smaller runs earlier."""
        self.stop = stop
        self.outlet = outlet
        self.params = params
        self.needs = int(needs)
        self.num_logprobs = num_logprobs
        self.num_prompt_logprobs = num_prompt_logprobs
        self.block_hashes = list(block_hashes)
        """Chained digests of the full blocks of known tokens."""
        self.text = text
        self.leader = leader
        """A sibling with the same prompt; this one waits until the leader's prompt can be shared."""

        self.state = State.WAITING
        self.slot = -1
        self.blocks: list[int] = []
        self.num_planned = 0
        """Positions computed or in flight."""
        self.num_computed = 0
        """Positions whose step has committed."""
        self.num_pending = 0
        """Tokens being drawn on the device."""
        self.num_in_flight = 0
        """Plans that name this sequence and have not committed."""
        self.num_cached = 0
        """Prompt positions taken from the prefix cache at the first admission."""
        self.admission_len = 0
        """Known tokens when the slot was given; rows that start below it are prefill."""
        self.credit = 0
        """Draws that may be planned before the outlet is asked again."""
        self.held = False
        """The outlet has no room: nobody takes the tokens."""
        self.prompt_logprobs: list[HostLogprobs] = []

    @property
    def length(self) -> int:
        """Tokens known or being drawn."""
        return len(self.tokens) + self.num_pending

    @property
    def num_output(self) -> int:
        """Tokens of the answer known on the host."""
        return len(self.tokens) - self.prompt_len

    def has_credit(self) -> bool:
        """Ask the outlet for room when the last grant is used up."""
        if self.credit <= 0:
            self.credit = self.outlet.room(self.num_pending)
        self.held = self.credit <= 0
        return not self.held

    def keep_prompt_logprobs(self, start: int, chunk: "HostLogprobs") -> None:
        """Append the values of a chunk at `start`: each once, though a displaced prompt comes again in other chunks."""
        known = sum([len(kept.chosen) for kept in self.prompt_logprobs]) - start
        if known < len(chunk.chosen):
            self.prompt_logprobs.append(chunk.after(known))

    def __repr__(self) -> str:
        return (
            f"Sequence(rank={self.rank}, {self.state.value}, slot={self.slot}, prompt={self.prompt_len}, "
            f"known={len(self.tokens)}, pending={self.num_pending}, planned={self.num_planned})"
        )
