"""`Engine`: the one door."""

import itertools
import os
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import anyio

from omni_async.bridge import Latch
from omni_async.errors import EngineClosed, EngineNotStarted, EngineStateError, OptionError, RequestError
from omni_async.host import Host
from omni_async.live import LiveRequests, StageDesk
from omni_async.mailbox import Mailbox
from omni_async.options import EngineOptions, OptionFields
from omni_async.sampling.params import count_logprobs
from omni_async.stage import Stage, StageStats
from omni_async.stream import EventStream, TextIterator
from omni_async.types import (
    Completion,
    Finished,
    Generation,
    Request,
    SamplingParams,
    TextDelta,
    TokenLogprob,
    Usage,
)

if TYPE_CHECKING:
    from omni_async.assembly import Load
    from omni_async.intake import Intake
    from omni_async.loading.loaded import Loaded

INTAKE_THREADS = 4
"""Threads that tokenise; more than one, so that a prompt of megabytes delays only itself."""

CLOSED = "the engine is closed; make a new one"


class Engine:
    """A model that answers requests, inside an async program.

        async with Engine.from_pretrained("path") as engine:
            async for event in engine.stream(Request(prompt="Hello")):
                ...

    It works on a thread of its own; `stream`, `generate` and `text` may be used from any number of event loops
    (asyncio, uvloop, trio) and threads at once. It is entered once; it installs no signal handlers.
    """

    def __init__(self, load: "Load", options: EngineOptions | None = None) -> None:
        self.options = options or EngineOptions()
        self._load = load
        self._host = Host(self._main, "omni-async-engine")
        self._ready = Latch()
        self._entered = False
        self._process = -1
        self._closing = False
        self._failure: BaseException | None = None
        self._stage: Stage | None = None
        self._intake: Intake | None = None
        self._preparing = ThreadPoolExecutor(INTAKE_THREADS, "omni-async-intake")
        self._arrivals = itertools.count()
        self._live = LiveRequests(self.options)

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Unpack[OptionFields]) -> Self:
        """An engine for a Hugging Face folder or a GGUF file; it is loaded when the engine is entered.

        `options` are the fields of `EngineOptions`.

        Raises:
            OptionError: an option is illegal, or `path` is no path.
        """
        if not isinstance(path, str | Path):
            raise OptionError(f"path must be a string or a pathlib.Path, got {path!r}")

        def load(options: EngineOptions) -> "Loaded":
            # Here, not above: `import omni_async` must not import torch and transformers.
            from omni_async.loading.pretrained import load_pretrained

            return load_pretrained(
                path,
                dtype=options.dtype,
                device=options.device,
                load_format=options.load_format,
                progress=options.progress,
            )

        return cls(load, EngineOptions(**options))

    # -- life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start the engine's thread and load the model.

        Raises:
            LoadError: the checkpoint cannot be loaded.
            OptionError: the options do not fit the model or the machine.
            EngineStateError: the engine was entered or closed before.
        """
        if self._entered:
            raise EngineStateError("an engine is entered once; make a new one")
        if self._closing:
            raise EngineClosed(CLOSED)
        self._host.start()
        self._entered = True
        self._process = os.getpid()
        try:
            await self._ready.wait()
        except BaseException:
            self._request_close()
            raise
        if self._stage is None:
            await self.aclose()
            assert self._failure is not None
            raise self._failure
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End every request with `EngineClosed`, then the engine's threads. May be called again."""
        self._request_close()
        if self._entered:
            with anyio.CancelScope(shield=True):
                await self._host.join()

    def _request_close(self) -> None:
        self._closing = True
        stage = self._stage
        if stage is not None:
            stage.close(EngineClosed(CLOSED))

    async def _main(self) -> None:
        """What the engine's thread runs."""
        try:
            from omni_async.assembly import assemble  # imports torch

            stage, self._intake = assemble(self._load, self.options, self._live.remove)
            self._stage = stage
        except BaseException as error:
            self._failure = error
            self._preparing.shutdown(wait=False)
            return
        finally:
            self._ready.set()
        if self._closing:  # closed while it was loading
            self._request_close()
        await stage.run()
        self._preparing.shutdown(wait=False, cancel_futures=True)
        for mailbox in self._live.take_all():  # what never reached the stage
            if not mailbox.ended:
                mailbox.fail(self._closed_error() or EngineClosed(CLOSED))
        self._preparing.shutdown(wait=True)

    # -- requests ------------------------------------------------------------------------------------------------

    def stream(self, request: Request) -> EventStream:
        """Submit a request and return its events.

        Raises:
            RequestError: the request cannot be served as written.
            DuplicateRequest: a live request has the same id.
            QueueFull: too many requests are under way.
            EngineStateError: the engine is not running.
        """
        if not isinstance(request, Request):
            raise RequestError(f"a Request is needed, got {type(request).__name__}")
        stage, intake = self._running()
        params = intake.sampling(request)
        mailbox = Mailbox(
            request_id=request.request_id if request.request_id is not None else uuid.uuid4().hex,
            arrival=next(self._arrivals),
            submitted=perf_counter(),
            num_answers=params.n,
            capacity=self.options.max_unread_tokens,
        )
        self._live.add(mailbox)
        if intake.is_quick(request, params):
            self._prepare(stage, intake, request, params, mailbox)
        else:
            try:
                self._preparing.submit(self._prepare, stage, intake, request, params, mailbox)
            except RuntimeError as error:  # the pool was shut down meanwhile
                self._live.remove(mailbox)
                raise self._closed_error() or EngineClosed(CLOSED) from error
        return EventStream(
            StageDesk(stage, self._live),
            mailbox,
            intake.tokenizer.vocabulary.token_bytes if intake.tokenizer is not None else _no_bytes,
            count_logprobs(params.logprobs, intake.vocab_size),
            count_logprobs(params.prompt_logprobs, intake.vocab_size),
        )

    def text(self, request: Request) -> TextIterator:
        """Submit a request and return the text of its first answer, piece by piece; raises as `stream` does."""
        return TextIterator(self.stream(request))

    async def generate(self, request: Request) -> Generation:
        """Submit a request and collect all of it.

        Raises:
            OmniError: as `stream` and its iterator raise.
        """
        answers: dict[int, list[TextDelta]] = {}
        ends: dict[int, Finished] = {}
        async with self.stream(request) as events:
            async for event in events:
                if isinstance(event, Finished):
                    ends[event.index] = event
                else:
                    answers.setdefault(event.index, []).append(event)
        completions = tuple(_complete(answers.get(index, []), ends[index]) for index in sorted(ends))
        first = completions[0].finished.usage
        produced = sum(c.finished.usage.completion_tokens for c in completions)
        usage = Usage(first.prompt_tokens, produced, first.cached_tokens)
        return Generation(events.request_id, completions, usage)

    def abort(self, request_id: str) -> bool:
        """End a live request with `Finished(reason="abort")`; false if no live request has this id."""
        stage, _ = self._running()
        mailbox = self._live.find(request_id)
        if mailbox is None:
            return False
        stage.cancel(mailbox, "abort")
        return True

    def stats(self) -> Mapping[str, StageStats]:
        """Counters by stage name.

        Raises:
            EngineStateError: the engine is not running.
        """
        stage, intake = self._running()
        return {intake.stage: stage.stats()}

    def _running(self) -> tuple[Stage, "Intake"]:
        closed = self._closed_error()
        if closed is not None:
            raise closed
        if self._stage is None or self._intake is None:
            raise EngineNotStarted("the engine is not running yet: use it inside `async with`")
        if os.getpid() != self._process:  # threads do not survive a fork: nobody would answer
            raise EngineStateError(
                f"the engine runs in process {self._process}, this is process {os.getpid()}: make one after the fork"
            )
        return self._stage, self._intake

    def _closed_error(self) -> EngineClosed | None:
        if self._stage is not None:
            return self._stage.closed_error()
        if self._failure is not None:
            error = EngineClosed(f"the engine did not start: {self._failure!r}")
            error.__cause__ = self._failure
            return error
        return EngineClosed(CLOSED) if self._closing else None

    def _prepare(
        self, stage: Stage, intake: "Intake", request: Request, params: SamplingParams, mailbox: Mailbox
    ) -> None:
        """Whatever goes wrong here ends this request; signals end more than that."""
        if self._live.find(mailbox.request_id) is not mailbox:
            return  # its caller has left: nobody waits for an end
        try:
            active = intake.prepare(request, params, mailbox)
        except BaseException as error:
            self._live.remove(mailbox)
            mailbox.fail(error)
            if not isinstance(error, Exception):
                raise
        else:
            stage.submit(active)


def _no_bytes(token_id: int) -> bytes:
    return b""


def _complete(deltas: list[TextDelta], finished: Finished) -> Completion:
    logprobs: list[TokenLogprob] = []
    for delta in deltas:
        logprobs.extend(delta.logprobs or ())
    asked = any(delta.logprobs is not None for delta in deltas)
    return Completion(
        index=finished.index,
        text="".join([delta.text for delta in deltas]),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(logprobs) if asked else None,
        finished=finished,
    )
