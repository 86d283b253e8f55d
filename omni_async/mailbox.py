"""What a request's answers gained, on its way from the engine's thread to the caller.

The engine only appends, the caller only takes; a deque's ends are safe to use from two threads, so neither ever
waits for the other. Unread tokens are bounded by credit: an answer is not planned while its caller lags.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from omni_async.bridge import Waiter, wait_here, wake
from omni_async.sampling.logprobs import HostLogprobs
from omni_async.types import Finished, FinishReason


class Piece(NamedTuple):
    """One drawn token of one answer."""

    answer: int
    token_id: int
    text: str
    logprobs: HostLogprobs | None
    """Of this token alone."""


quick_piece = partial(tuple.__new__, Piece)
"""`Piece` from a tuple of its fields, in half the time: one is made for every token drawn."""


class Outlet:
    """The end of one answer's pipe that the scheduler sees."""

    __slots__ = ("capacity", "held", "index", "mailbox", "produced", "taken")

    def __init__(self, mailbox: "Mailbox", index: int, capacity: int) -> None:
        self.mailbox = mailbox
        self.index = index
        self.capacity = capacity
        self.produced = 0
        self.taken = 0
        self.held = False

    def room(self, pending: int) -> int:
        """How many tokens may still be drawn, `pending` of them being under way; `held` asks for a wake-up."""
        room = self.capacity - (self.produced - self.taken) - pending
        if room <= 0:
            self.held = True
            # The caller reads `held` after it wrote `taken`: looking again closes the gap between the two.
            room = self.capacity - (self.produced - self.taken) - pending
        return room


class Mailbox:
    """All answers of one request."""

    __slots__ = (
        "arrival",
        "ended",
        "error",
        "outcome",
        "outlets",
        "pieces",
        "prompt_ids",
        "prompt_logprobs",
        "request_id",
        "submitted",
        "waiter",
    )

    def __init__(self, request_id: str, arrival: int, submitted: float, num_answers: int, capacity: int) -> None:
        self.request_id = request_id
        self.arrival = arrival
        self.submitted = submitted
        """`time.perf_counter()` when the request was made."""
        self.pieces: deque[Piece | Finished] = deque()
        self.outlets = tuple(Outlet(self, index, capacity) for index in range(num_answers))
        self.prompt_ids: Sequence[int] = ()
        self.prompt_logprobs: Sequence[HostLogprobs] = ()
        """Of `prompt_ids[1:]`, in chunks, if they were asked for; all of them before the first token is drawn."""
        self.waiter: Waiter | None = None
        """Who waits; the caller's thread may take it away at any time, so it is to be read once."""
        self.error: BaseException | None = None
        self.ended = False
        """Set after the last piece, or the error, is in place."""
        self.outcome: FinishReason | BaseException | None = None
        """How a request that is cancelled is to end, noted before the engine may know the request."""

    def fail(self, error: BaseException) -> None:
        """End the request with an error, on whichever thread found it."""
        self.error = error
        self.ended = True
        waiter = self.waiter
        if waiter is not None:
            wake([waiter])

    async def wait(self) -> None:
        """Return once there is something to take or the end has come."""
        waiter = self.waiter = wait_here()
        try:
            if not self.pieces and not self.ended:
                await waiter.wait()
        finally:
            self.waiter = None
