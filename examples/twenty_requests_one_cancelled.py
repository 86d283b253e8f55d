"""Twenty requests at once, one cancelled half-way: `python examples/twenty_requests_one_cancelled.py [MODEL]`."""

import asyncio
import sys

from omni_async import Engine, Request, SamplingParams
from omni_async.cli import find_default_model

NUM_REQUESTS = 20
CANCELLED = 7
SAMPLING = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


async def ask(engine: Engine, number: int, has_begun: asyncio.Event) -> str:
    """One caller: the answer to its question. Cancelling this task ends the request in the engine as well."""
    pieces: list[str] = []
    async with engine.text(Request(prompt=f"{number} plus {number} is", sampling=SAMPLING)) as text:
        async for piece in text:
            pieces.append(piece)
            has_begun.set()
    return "".join(pieces)


async def main(model: str) -> None:
    """Ask all, cancel one as soon as it speaks, and print what the others said."""
    async with Engine.from_pretrained(model) as engine:
        begun = [asyncio.Event() for _ in range(NUM_REQUESTS)]
        tasks = [asyncio.create_task(ask(engine, number, begun[number])) for number in range(NUM_REQUESTS)]
        await begun[CANCELLED].wait()
        tasks[CANCELLED].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for number, answer in enumerate(answers):
            print(f"{number:2}: {'cancelled' if isinstance(answer, asyncio.CancelledError) else repr(answer)}")
        stats = engine.stats()["text"]
        print(f"running {stats.running}, waiting {stats.waiting}, steps {stats.steps}, tokens {stats.tokens}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else str(find_default_model())))
