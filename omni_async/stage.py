"""The loop that drives one stage: admit, plan, launch, commit, publish. It runs on the engine's own thread."""

import asyncio
from collections import deque
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol, cast

from omni_async.bridge import Waiter, wake
from omni_async.errors import DeadlineExceeded, EngineClosed
from omni_async.mailbox import Mailbox, Outlet, quick_piece
from omni_async.scheduler.plan import StepOutput, StepPlan, Update
from omni_async.scheduler.scheduler import Scheduler
from omni_async.scheduler.sequence import Sequence, State
from omni_async.types import Finished, FinishReason, Timings, Usage


class StepRunner(AbstractAsyncContextManager["StepRunner"], Protocol):
    """Runs plans on the device, in the order of their launch."""

    def launch(self, plan: StepPlan) -> Awaitable[StepOutput]:
        """Start a step without waiting for it; its failure is part of the output, that of the device is raised."""
        ...


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that the stage knows: its answers and what must be undone at its end."""

    mailbox: Mailbox
    sequences: list[Sequence]
    deadline_s: float | None = None
    unfinished: int = 0
    deadline: asyncio.TimerHandle | None = None
    admitted_s: list[float | None] = field(default_factory=list)
    first_token_s: list[float | None] = field(default_factory=list)
    """By answer; `None` until it happens."""


class RequestEnded(Protocol):
    """Told of each end before the caller is, so that the id may be used again."""

    def __call__(self, mailbox: Mailbox) -> None:
        """`mailbox` has ended."""
        ...


@dataclass(frozen=True, slots=True)
class StageStats:
    """A stage at one moment; cached blocks without an owner count as free."""

    running: int
    waiting: int
    held: int
    """Running answers whose callers have too much unread."""
    requests: int
    slots_used: int
    slots_total: int
    blocks_free: int
    blocks_total: int
    blocks_findable: int
    steps: int
    preemptions: int
    tokens: int
    """Tokens drawn so far."""


class Stage:
    """One model's scheduler and runner, and the requests between them.

    `submit`, `cancel`, `wake` and `close` may be called on any thread and never block.
    """

    def __init__(
        self, scheduler: Scheduler, runner: StepRunner, *, output: str, pipelined: bool, on_end: RequestEnded
    ) -> None:
        self.scheduler = scheduler
        self._output = output
        self._runner = runner
        self._depth = 1 if pipelined else 0
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._awake = asyncio.Event()
        self._waking = False
        self._submitted: deque[ActiveRequest] = deque()
        self._cancelled: deque[Mailbox] = deque()
        self._active: dict[Mailbox, ActiveRequest] = {}
        self._closing: EngineClosed | None = None
        self._has_ended = False
        self._tokens = 0
        self._woken: list[Waiter] = []

    # -- called from any thread ----------------------------------------------------------------------------------

    def submit(self, request: ActiveRequest) -> None:
        """Hand over a prepared request."""
        self._submitted.append(request)
        if self._has_ended:  # nobody will look at the queue again
            self._refuse_submitted()
        self.wake()

    def cancel(self, mailbox: Mailbox, outcome: FinishReason | BaseException) -> None:
        """End a request, submitted yet or not; its caller, if there still is one, sees `outcome`."""
        mailbox.outcome = outcome
        self._cancelled.append(mailbox)
        self.wake()

    def close(self, error: EngineClosed) -> None:
        """End every request with `error` and leave `run`."""
        if self._closing is None:
            self._closing = error
        self.wake()

    def closed_error(self) -> EngineClosed | None:
        """Why the stage takes no more requests, known before the first of them ends; each call makes a new object."""
        if self._closing is None:
            return None
        error = EngineClosed(*self._closing.args)
        error.__cause__ = self._closing.__cause__
        return error

    def wake(self) -> None:
        """Look at what has changed."""
        if not self._waking:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._awake.set)
            except RuntimeError:  # the loop has ended, and every request with it
                return
            except BaseException:  # a signal's, raised amid the call: nobody may rely on this wake-up
                self._waking = False
                raise

    def stats(self) -> StageStats:
        """The stage's counters."""
        scheduler = self.scheduler
        return StageStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            held=sum(sequence.held for sequence in scheduler.running.copy()),
            requests=len(self._active),
            slots_used=scheduler.slots_used,
            slots_total=scheduler.limits.num_slots,
            blocks_free=scheduler.pool.num_free,
            blocks_total=scheduler.pool.num_blocks,
            blocks_findable=scheduler.pool.num_findable,
            steps=scheduler.num_steps,
            preemptions=scheduler.num_preemptions,
            tokens=self._tokens,
        )

    # -- the loop ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until `close`, or until a fault of the engine itself, which then is every request's error."""
        try:
            async with self._runner:
                await self._serve()
        except BaseException as fault:
            self._closing = EngineClosed(f"the engine stopped on a fault: {fault!r}")
            self._closing.__cause__ = fault
        self._has_ended = True
        # Without the scheduler, which may be what failed.
        for request in list(self._active.values()):
            self._forget(request)
            request.mailbox.fail(self._closed())
        self._hand_over()  # to those whose requests ended just before the fault
        self._refuse_submitted()

    async def _serve(self) -> None:
        """The loop: while the device runs a step, the one before it is committed and the next one is planned."""
        flying: deque[Awaitable[StepOutput]] = deque()
        while self._closing is None:
            self._admit()
            plan = self.scheduler.plan()
            if plan is not None:
                self._stamp_admissions(plan)
                flying.append(self._runner.launch(plan))
            # Only now: readers on other threads take the interpreter lock, for which the launch would have to wait.
            self._hand_over()
            if not flying:
                await self._sleep()
            elif plan is None or len(flying) > self._depth:
                self._publish(self.scheduler.commit(await flying.popleft()))
        for request in list(self._active.values()):
            self._end(request, self._closed())
        self._hand_over()
        while flying:
            self.scheduler.commit(await flying.popleft())

    async def _sleep(self) -> None:
        """Wait for a message.

        While `_waking` is true the event is set or about to be. It is lowered before the event, and the queues are
        read after both, so no message is missed.
        """
        await self._awake.wait()
        self._waking = False
        self._awake.clear()

    def _admit(self) -> None:
        """Take in what has been submitted and cancelled since the last step."""
        while self._submitted:
            request = self._submitted.popleft()
            self._active[request.mailbox] = request
            first = request.sequences[0]
            if first.num_prompt_logprobs >= 0:
                request.mailbox.prompt_ids = first.tokens[:]
                request.mailbox.prompt_logprobs = first.prompt_logprobs
            request.unfinished = len(request.sequences)
            request.admitted_s = [None] * len(request.sequences)
            request.first_token_s = [None] * len(request.sequences)
            for sequence in request.sequences:
                self.scheduler.add(sequence)
            if request.mailbox.outcome is not None:  # cancelled while it was prepared
                self._end(request, request.mailbox.outcome)
            elif request.deadline_s is not None:
                left = request.mailbox.submitted + request.deadline_s - perf_counter()
                request.deadline = self._loop.call_later(max(left, 0), self._expire, request)
        while self._cancelled:
            mailbox = self._cancelled.popleft()
            active = self._active.get(mailbox)
            if active is not None and mailbox.outcome is not None:
                self._end(active, mailbox.outcome)

    def _expire(self, request: ActiveRequest) -> None:
        limit = f"the deadline of {request.deadline_s:g} s passed"
        self._end(request, DeadlineExceeded(f"request {request.mailbox.request_id!r}: {limit}"))
        self._hand_over()
        self.wake()

    def _stamp_admissions(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            outlet = cast("Outlet", admission.sequence.outlet)
            times = self._active[outlet.mailbox].admitted_s
            if times[outlet.index] is None:
                times[outlet.index] = perf_counter() - outlet.mailbox.submitted

    # -- results -------------------------------------------------------------------------------------------------

    def _publish(self, updates: list[Update]) -> None:
        """Put what a step brought into the mailboxes; their readers are woken later. Never waits."""
        for update in updates:
            sequence = update.sequence
            outlet = cast("Outlet", sequence.outlet)
            mailbox = outlet.mailbox
            if mailbox.ended:  # the failure of another answer, in this very step, has ended the request
                continue
            if update.error is not None:
                self._end(self._active[mailbox], update.error)
                continue
            if outlet.produced == 0:
                self._active[mailbox].first_token_s[outlet.index] = perf_counter() - mailbox.submitted
            outlet.produced += 1
            self._tokens += 1
            logprobs = None
            if update.logprobs is not None and sequence.num_logprobs >= 0:
                logprobs = update.logprobs.entry(update.draw, sequence.num_logprobs)
            mailbox.pieces.append(quick_piece((outlet.index, update.token_id, update.text, logprobs)))
            if update.reason is not None:
                self._finish(self._active[mailbox], outlet.index, update.reason, update.stop_reason)
            waiter = mailbox.waiter
            if waiter is not None:
                self._woken.append(waiter)

    def _finish(self, request: ActiveRequest, index: int, reason: FinishReason, stop_reason: int | str | None) -> None:
        """One answer is complete."""
        sequence = request.sequences[index]
        now = perf_counter() - request.mailbox.submitted
        finished = Finished(
            reason=reason,
            stop_reason=stop_reason,
            usage=Usage(sequence.prompt_len, sequence.num_output, sequence.num_cached),
            timings=Timings(request.admitted_s[index], request.first_token_s[index], now, sequence.num_output),
            index=index,
            reasons={self._output: reason},
        )
        request.unfinished -= 1
        last = request.unfinished == 0
        if last:
            self._forget(request)
        request.mailbox.pieces.append(finished)
        if last:
            request.mailbox.ended = True

    def _end(self, request: ActiveRequest, outcome: FinishReason | BaseException) -> None:
        """End what is left of a request, in every part of the stage."""
        unfinished = [i for i, s in enumerate(request.sequences) if s.state is not State.ENDED]
        for index in unfinished:
            self.scheduler.end(request.sequences[index])
        mailbox = request.mailbox
        if mailbox.ended:
            return
        if isinstance(outcome, BaseException):
            self._forget(request)
            mailbox.error = outcome
            mailbox.ended = True
        else:
            for index in unfinished:
                self._finish(request, index, outcome, None)
        waiter = mailbox.waiter
        if waiter is not None:
            self._woken.append(waiter)

    def _forget(self, request: ActiveRequest) -> None:
        self._active.pop(request.mailbox, None)
        if request.deadline is not None:
            request.deadline.cancel()
        self._on_end(request.mailbox)

    def _closed(self) -> EngineClosed:
        return self.closed_error() or EngineClosed("the engine is closed")

    def _refuse_submitted(self) -> None:
        """Requests that came too late end here, on whichever thread noticed."""
        while True:
            try:
                mailbox = self._submitted.popleft().mailbox
            except IndexError:
                return
            self._on_end(mailbox)
            mailbox.fail(self._closed())

    def _hand_over(self) -> None:
        """Wake all readers that have news, once per event loop; requests of dead loops end."""
        if not self._woken:
            return
        woken, self._woken = self._woken, []
        gone = wake(woken)
        if gone:
            for mailbox in self._active:
                waiter = mailbox.waiter
                if waiter is not None and waiter.loop in gone:
                    self.cancel(mailbox, "abort")
