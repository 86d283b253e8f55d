"""`omni-async chat`: a conversation on the terminal."""

import argparse
import asyncio
import sys
from contextlib import suppress

from omni_async.api import Engine
from omni_async.cli.exit_code import ExitCode
from omni_async.cli.flags import Commands, add_command, add_sampling_flags, make_engine, read_sampling
from omni_async.errors import EngineStateError, OmniError, PromptTooLong
from omni_async.types import Message, Request, SamplingParams, TextDelta

with suppress(ImportError):  # not on every platform
    import readline  # noqa: F401  gives `input` line editing and a history

HELP = "/reset forgets the conversation, /exit ends; Ctrl-C cancels an answer, at the prompt it ends as well."


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "chat", "talk with the model", HELP)
    parser.add_argument("--system", metavar="TEXT", help="instructions that come before the conversation")
    add_sampling_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> ExitCode:
    """Converse until `/exit`, the end of the input, or Ctrl-C at the prompt (KeyboardInterrupt).

    The engine has a thread of its own, so this one may wait for a line without an event loop. The loop runs for one
    answer at a time, and its runner turns Ctrl-C into the cancellation of that answer.
    """
    engine = make_engine(options)
    sampling = read_sampling(options)
    system: list[Message] = [] if options.system is None else [{"role": "system", "content": options.system}]
    with asyncio.Runner() as runner:
        runner.run(engine.__aenter__())
        try:
            _converse(engine, runner, sampling, system)
        finally:
            runner.run(engine.aclose())
    return ExitCode.OK


def _converse(engine: Engine, runner: asyncio.Runner, sampling: SamplingParams, system: list[Message]) -> None:
    mark = ""
    if sys.stdin.isatty():
        mark = "> "
        print(HELP)
    history = system.copy()
    while True:
        try:
            line = input(mark).strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line == "/reset":
            history = system.copy()
        elif line.startswith("/"):
            print(f"{line} is not a command. {HELP}")
        elif line:
            history.append({"role": "user", "content": line})
            said = _answer(engine, runner, Request(messages=history, sampling=sampling))
            if said:
                history.append({"role": "assistant", "content": said})
            else:
                history.pop()


def _answer(engine: Engine, runner: asyncio.Runner, request: Request) -> str:
    """Print the answer while it is made, and return what was printed; an error is one of this turn only."""
    said: list[str] = []

    async def answer() -> None:
        async with engine.stream(request) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    said.append(event.text)
                    print(event.text, end="", flush=True)
                elif event.reason == "length":
                    print(" [cut: --max-tokens, or the conversation fills --max-model-len]", end="")

    try:
        runner.run(answer())
        print()
    except KeyboardInterrupt:
        print(" [cancelled]")
    except EngineStateError:
        raise
    except PromptTooLong as error:
        print(f"omni-async: {error}: /reset forgets the conversation, --max-model-len makes room", file=sys.stderr)
    except OmniError as error:
        print(f"\nomni-async: {error}", file=sys.stderr)
    return "".join(said)
