"""The caller's side of a request."""

from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

import anyio
import anyio.lowlevel

from omni_async.bridge import wake
from omni_async.errors import EngineStateError
from omni_async.mailbox import Mailbox, Piece
from omni_async.sampling.logprobs import TokenBytes, token_logprob
from omni_async.types import Event, Finished, TextDelta, TokenLogprob

LOGPROBS_A_TURN = 256
"""Log-probabilities turned into objects before the caller's loop gets a turn: well under a millisecond's work."""


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
        self._cancelled = False

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
            self._desk.leave(self._mailbox)
            waiter = self._mailbox.waiter
            if waiter is not None:  # another task reads: it need not wait for the engine to notice
                wake([waiter])

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
        except BaseException as error:
            # A cancelled read ends the request at once: the traceback may keep this stream alive for long. When the
            # garbage collector closes the reader (GeneratorExit), no lock may be taken; `__del__` follows.
            if not isinstance(error, Exception | GeneratorExit):
                self._cancelled = True
                self._close()
            raise
        finally:
            self._reading = False

    async def _next(self) -> Event:
        mailbox = self._mailbox
        if self._closed:
            if self._cancelled:
                raise EngineStateError(
                    f"request {self.request_id!r} ended when a read of it was cancelled; "
                    "to wait for an event with a time limit, read in a task of its own"
                )
            raise StopAsyncIteration
        if self._events or mailbox.pieces or mailbox.ended:
            await anyio.lowlevel.checkpoint()
        else:
            await mailbox.wait()
        while True:
            if self._closed:  # meanwhile, by another task
                raise StopAsyncIteration
            ended = mailbox.ended  # read before the pieces: the engine writes it after them
            if not self._events:
                self._take()
            if self._events:
                event = self._events.pop()
                return await self._complete(event) if isinstance(event, Finished) else event
            if ended:
                self._close()
                if mailbox.error is not None:
                    raise mailbox.error
                raise StopAsyncIteration
            await mailbox.wait()

    def _take(self) -> None:
        """Turn what has arrived into as few events as keep its order; with log-probabilities, no more than is quick."""
        mailbox = self._mailbox
        count = len(mailbox.pieces)
        if count == 1 and self._num_logprobs < 0:  # the usual case
            piece = mailbox.pieces.popleft()
            self._events.append(piece if isinstance(piece, Finished) else self._delta([piece]))
            return
        if self._num_logprobs >= 0:
            count = min(count, self._positions_a_turn(self._num_logprobs))
        gained: dict[int, list[Piece]] = {}
        events: list[Event] = []
        for _ in range(count):
            piece = mailbox.pieces.popleft()
            if isinstance(piece, Finished):
                if piece.index in gained:
                    events.append(self._delta(gained.pop(piece.index)))
                events.append(piece)
            else:
                gained.setdefault(piece.answer, []).append(piece)
        events.extend(self._delta(pieces) for pieces in gained.values())
        events.reverse()
        self._events = events

    def _delta(self, pieces: list[Piece]) -> TextDelta:
        index, token_id, text, _ = pieces[0]
        outlet = self._mailbox.outlets[index]
        outlet.taken += len(pieces)
        if outlet.held:
            outlet.held = False
            self._desk.wake()
        if len(pieces) == 1 and self._num_logprobs < 0:
            return TextDelta(text, (token_id,), None, index)
        logprobs = None
        if self._num_logprobs >= 0:
            logprobs = tuple(
                token_logprob(p.token_id, p.logprobs, 0, self._num_logprobs, self._token_bytes)
                for p in pieces
                if p.logprobs is not None
            )
        return TextDelta(
            text="".join([p.text for p in pieces]),
            token_ids=tuple([p.token_id for p in pieces]),
            logprobs=logprobs,
            index=index,
        )

    async def _complete(self, finished: Finished) -> Finished:
        """Add the prompt's log-probabilities, if they were asked for, in turns that are short."""
        if self._num_prompt_logprobs < 0:
            return finished
        mailbox = self._mailbox
        made: list[TokenLogprob | None] = [None]
        positions_a_turn = self._positions_a_turn(self._num_prompt_logprobs)
        for chunk in mailbox.prompt_logprobs:
            for at in range(len(chunk.chosen)):
                token = mailbox.prompt_ids[len(made)]
                made.append(token_logprob(token, chunk, at, self._num_prompt_logprobs, self._token_bytes))
                if len(made) % positions_a_turn == 0:
                    await anyio.lowlevel.checkpoint()
        whole = len(made) == len(mailbox.prompt_ids)  # else it was aborted before the prompt was computed
        return replace(finished, prompt_logprobs=tuple(made) if whole else None)

    @staticmethod
    def _positions_a_turn(num_top: int) -> int:
        return max(1, LOGPROBS_A_TURN // (num_top + 1))


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
