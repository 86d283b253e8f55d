"""A model inside an asyncio program: `python examples/embed_in_asyncio.py [MODEL]`."""

import asyncio
import sys

from omni_async import Engine, Request, SamplingParams
from omni_async.cli import find_default_model


async def main(model: str) -> None:
    """Print an answer while it is made."""
    question = {"role": "user", "content": "What is the capital of France?"}
    async with Engine.from_pretrained(model) as engine:
        request = Request(messages=[question], sampling=SamplingParams(temperature=0, max_tokens=60))
        async with engine.text(request) as pieces:
            async for piece in pieces:
                print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else str(find_default_model())))
