"""The caller's side of a request."""

from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

import anyio
import anyio.lowlevel

from omni_async.errors import EngineStateError
from omni_async.mailbox import Mailbox, Piece
from omni_async.scheduler.plan import HostLogprobs
from omni_async.types import Event, Finished, TextDelta, TokenLogprob

TokenBytes = Callable[[int], bytes]


class Desk(Protocol):
    """Where a stream tells the engine what its caller did; every method may be called on any thread."""

    def leave(self, mailbox: Mailbox) -> None:
        """The caller has left: end the request, and let its id be used again at once."""
        ...

    def abandon(self, mailbox: Mailbox) -> None:
        """The same from a finaliser: takes no lock and touches no event loop."""
        ...

    def wake(self) -> None:
        """A request that was held back for want of credit may go on."""
        ...


class EventStream:
    """The events of one request, in order; leaving it in any way ends the request at once.

    Iterate with `async for`, inside `async with` or not: a break, a cancellation, an exception, `aclose` and
    garbage collection all end the request. One task may iterate at a time; tokens that arrived since the last
    event come as one delta.

    Raises:
        OmniError: from the iterator, when the request fails; its cause is chained.
    """

    def __init__(
        self, desk: Desk, mailbox: Mailbox, token_bytes: TokenBytes, num_logprobs: int, num_prompt_logprobs: int
    ) -> None:
        self._desk = desk
        self._mailbox = mailbox
        self._token_bytes = token_bytes
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        self._events: list[Event] = []
        """Made but not handed out, the next one last."""
        self._reading = False
        self._closed = False

    @property
    def request_id(self) -> str:
        """The request's id, given or made."""
        return self._mailbox.request_id

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the request if it has not ended; what was not read is dropped. May be called again."""
        self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._events.clear()
            self._desk.leave(self._mailbox)

    def __del__(self) -> None:
        if not self._closed:
            self._desk.abandon(self._mailbox)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._reading:
            raise EngineStateError(f"request {self.request_id!r} is already being read by another task")
        self._reading = True
        try:
            return await self._next()
        finally:
            self._reading = False

    async def _next(self) -> Event:
        mailbox = self._mailbox
        if self._closed:
            raise StopAsyncIteration
        if self._events or mailbox.pieces or mailbox.ended:
            await anyio.lowlevel.checkpoint()
        while not self._events:
            ended = mailbox.ended  # read before the pieces: the engine writes it after them
            self._take()
            if self._events:
                break
            if ended:
                self._close()
                if mailbox.error is not None:
                    raise mailbox.error
                raise StopAsyncIteration
            await mailbox.wait()
        return self._events.pop()

    def _take(self) -> None:
        """Turn everything that has arrived into as few events as keep their order."""
        mailbox = self._mailbox
        gained: dict[int, list[Piece]] = {}
        events: list[Event] = []
        for _ in range(len(mailbox.pieces)):
            piece = mailbox.pieces.popleft()
            if isinstance(piece, Finished):
                if piece.index in gained:
                    events.append(self._delta(gained.pop(piece.index)))
                events.append(self._complete(piece))
            else:
                gained.setdefault(piece.answer, []).append(piece)
        events.extend(self._delta(pieces) for pieces in gained.values())
        events.reverse()
        self._events = events

    def _delta(self, pieces: list[Piece]) -> TextDelta:
        index = pieces[0].answer
        outlet = self._mailbox.outlets[index]
        outlet.taken += len(pieces)
        if outlet.held:
            outlet.held = False
            self._desk.wake()
        logprobs = None
        if self._num_logprobs >= 0:
            logprobs = tuple(
                token_logprob(p.token_id, p.logprobs, p.draw, self._num_logprobs, self._token_bytes)
                for p in pieces
                if p.logprobs is not None
            )
        return TextDelta(
            text="".join([p.text for p in pieces]),
            token_ids=tuple([p.token_id for p in pieces]),
            logprobs=logprobs,
            index=index,
        )

    def _complete(self, finished: Finished) -> Finished:
        """Add the prompt's log-probabilities, if they were asked for."""
        if self._num_prompt_logprobs < 0:
            return finished
        mailbox = self._mailbox
        made: list[TokenLogprob | None] = [None]
        for chunk in mailbox.prompt_logprobs:
            for at in range(len(chunk.chosen)):
                token = mailbox.prompt_ids[len(made)]
                made.append(token_logprob(token, chunk, at, self._num_prompt_logprobs, self._token_bytes))
        return replace(finished, prompt_logprobs=tuple(made))


def token_logprob(token_id: int, values: HostLogprobs, at: int, num_top: int, token_bytes: TokenBytes) -> TokenLogprob:
    """The public form of entry `at` of a step's log-probabilities."""
    ids: list[int] = values.top_ids[at, :num_top].tolist()
    best: list[float] = values.top[at, :num_top].tolist()
    ranks = [1] * len(ids)
    for i in range(1, len(ids)):
        ranks[i] = ranks[i - 1] if best[i] == best[i - 1] else i + 1
    top = tuple(TokenLogprob(i, value, rank, token_bytes(i)) for i, value, rank in zip(ids, best, ranks, strict=True))
    return TokenLogprob(token_id, float(values.chosen[at]), int(values.rank[at]), token_bytes(token_id), top)


class TextIterator:
    """The text of a request's first answer, piece by piece; ends as `EventStream` ends."""

    def __init__(self, events: EventStream) -> None:
        self._events = events

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while True:
            event = await self._events.__anext__()
            if isinstance(event, TextDelta) and event.text and event.index == 0:
                return event.text

    async def aclose(self) -> None:
        """End the request if it has not ended."""
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
