"""`omni-async generate`: answers to one prompt or many."""

import argparse
import asyncio
import json
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from omni_async.api import Engine
from omni_async.cli.exit_code import ExitCode
from omni_async.cli.flags import Commands, add_command, add_sampling_flags, make_engine, read_sampling
from omni_async.errors import EngineStateError, OmniError
from omni_async.stream import EventStream
from omni_async.types import Finished, Request, SamplingParams

MORE = """The prompt is the argument; or each line of a file is one; or all of the standard input is one. Several
prompts run at the same time, and are printed in their order. A prompt that fails is reported, and the others go on."""


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "generate", "answer prompts", MORE)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("prompt", nargs="?", metavar="PROMPT", help="default: all of the standard input")
    source.add_argument("--file", metavar="PATH", help="one prompt a line, empty lines are skipped; -: standard input")
    parser.add_argument("--chat", action="store_true", help="put each prompt through the chat template, as one turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line, with counts and times")
    parser.add_argument("--stats", action="store_true", help="print counts and times of each answer to standard error")
    add_sampling_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> ExitCode:
    """Answer all prompts."""
    sampling = read_sampling(options)
    prompts = _read_prompts(options)
    # Answers are printed in order: those further down must not be held back while they are not read.
    engine = make_engine(options, max_unread_tokens=2**24)
    return asyncio.run(_generate(engine, prompts, sampling, options))


def _read_prompts(options: argparse.Namespace) -> Sequence[str]:
    if options.prompt is not None:
        return [options.prompt]
    if options.file is None:
        if sys.stdin.isatty():
            print("Write the prompt; Ctrl-D on a line of its own ends it.", file=sys.stderr)
        return [sys.stdin.read()]
    text = sys.stdin.read() if options.file == "-" else Path(options.file).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.strip()]


async def _generate(
    engine: Engine, prompts: Sequence[str], sampling: SamplingParams, options: argparse.Namespace
) -> ExitCode:
    """Submit as many prompts as the engine takes, and print their answers in order."""
    code = ExitCode.OK
    most = engine.options.max_slots + engine.options.max_waiting
    ahead: deque[EventStream] = deque()
    async with engine:
        for index, prompt in enumerate(prompts):
            while len(ahead) < most and index + len(ahead) < len(prompts):
                ahead.append(engine.stream(_request(prompts[index + len(ahead)], sampling, options.chat)))
            if len(prompts) > 1 and not options.json:
                print(f"[{index + 1}/{len(prompts)}] {prompt}", flush=True)
            try:
                async with ahead.popleft() as events:
                    await _print_answer(index, prompt, events, options)
            except EngineStateError:
                raise
            except OmniError as error:
                code = ExitCode.FAILURE
                if options.json:
                    print(json.dumps({"index": index, "prompt": prompt, "error": str(error)}), flush=True)
                else:
                    print(f"omni-async: prompt {index + 1}: {error}", file=sys.stderr)
    return code


def _request(prompt: str, sampling: SamplingParams, chat: bool) -> Request:
    if chat:
        return Request(messages=[{"role": "user", "content": prompt}], sampling=sampling)
    return Request(prompt=prompt, sampling=sampling)


async def _print_answer(index: int, prompt: str, events: EventStream, options: argparse.Namespace) -> None:
    """Text goes out as it comes, JSON at the end."""
    text: list[str] = []
    async for event in events:
        if isinstance(event, Finished):
            if options.json:
                print(json.dumps(_record(index, prompt, "".join(text), event)), flush=True)
            else:
                print(flush=True)
            if options.stats:
                print(_summary(event), file=sys.stderr)
        elif options.json:
            text.append(event.text)
        else:
            print(event.text, end="", flush=True)


def _record(index: int, prompt: str, text: str, end: Finished) -> dict[str, object]:
    return {
        "index": index,
        "prompt": prompt,
        "text": text,
        "finish_reason": end.reason,
        "stop_reason": end.stop_reason,
        "prompt_tokens": end.usage.prompt_tokens,
        "cached_tokens": end.usage.cached_tokens,
        "completion_tokens": end.usage.completion_tokens,
        "admitted_s": end.timings.admitted_s,
        "first_token_s": end.timings.first_token_s,
        "inter_token_s": end.timings.inter_token_s,
        "finished_s": end.timings.finished_s,
    }


def _summary(end: Finished) -> str:
    usage, times = end.usage, end.timings
    first = f"{times.first_token_s:.2f} s to the first, " if times.first_token_s is not None else ""
    return (
        f"({usage.prompt_tokens} tokens of prompt, {usage.completion_tokens} of answer; {first}"
        f"{times.inter_token_s * 1e3:.1f} ms for each further one; ended by {end.reason!r})"
    )
