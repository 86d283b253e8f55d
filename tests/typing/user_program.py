"""What a user writes, and the types that a checker sees in it; checked by mypy, never run."""

from collections.abc import Mapping
from pathlib import Path
from typing import assert_type

from omni_async import (
    Completion,
    Engine,
    Event,
    EventStream,
    Finished,
    Generation,
    Request,
    SamplingParams,
    StageStats,
    TextDelta,
    TextIterator,
    TokenLogprob,
    Usage,
)


async def use(request: Request) -> None:
    """Every door of the engine."""
    async with Engine.from_pretrained(Path("model"), device="cpu", max_slots=4) as engine:
        assert_type(engine, Engine)
        assert_type(engine.stats(), Mapping[str, StageStats])
        assert_type(engine.abort("id"), bool)
        stream = engine.stream(request)
        assert_type(stream, EventStream)
        async with stream as events:
            assert_type(events, EventStream)
            async for event in events:
                assert_type(event, Event)
                match event:
                    case TextDelta(text=text, token_ids=ids, logprobs=logprobs):
                        assert_type(text, str)
                        assert_type(ids, tuple[int, ...])
                        assert_type(logprobs, tuple[TokenLogprob, ...] | None)
                    case Finished(usage=usage, stop_reason=stop_reason):
                        assert_type(usage, Usage)
                        assert_type(stop_reason, int | str | None)
        pieces = engine.text(request)
        assert_type(pieces, TextIterator)
        async for piece in pieces:
            assert_type(piece, str)
        result = await engine.generate(request)
        assert_type(result, Generation)
        assert_type(result.completions, tuple[Completion, ...])
        assert_type(result.text, str)


def name_each_kind(event: Event) -> str:
    """A match over all events is known to be complete: mypy would ask for a return below it."""
    match event:
        case TextDelta():
            return "delta"
        case Finished():
            return "end"


Request(prompt="Hi", sampling={"text": SamplingParams(stop="x", logit_bias={1: 2.0})}, outputs={"text"})
Request(messages=[{"role": "user", "content": "Hi"}], sampling=SamplingParams(stop=["a", "b"]))

# What is wrong is seen: strict mypy complains of an `ignore` that hides nothing.
Request("Hi")  # type: ignore[call-arg]
Request(prompt=b"Hi")  # type: ignore[arg-type]
SamplingParams(temperature="hot")  # type: ignore[arg-type]
SamplingParams(max_token=3)  # type: ignore[call-arg]
Engine.from_pretrained("model", slots=4)  # type: ignore[call-arg]
Engine.from_pretrained("model", device="gpu")  # type: ignore[arg-type]
