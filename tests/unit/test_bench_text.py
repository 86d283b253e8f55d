"""The benchmark of text models, on a tiny model and the CPU; its limits; its plot."""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
import torch

from bench.engine import text_on_cuda
from bench.engine.aims import AIMS
from bench.engine.shapes import SHAPES, Shape
from bench.engine.text_on_cuda import Plan, measure_model
from bench.environment import Environment
from bench.kernels.__main__ import main as run_kernels
from bench.plot import latency_lines
from bench.plot import main as draw
from bench.report import Figure, Report
from omni_async.loading.pretrained import load_pretrained
from omni_async.measure.ceilings import Ceilings
from omni_async.models.layers.causal_lm import CausalLM

H200 = Ceilings(bandwidth=4.23e12, rate=770e12)
TINY = Shape(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    num_layers=2,
    hidden_size=32,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_size=16,
    vocab_size=300,
    num_experts=4,
    top_k=2,
    max_positions=4096,
)


@pytest.mark.parametrize(
    ("name", "parameters_b", "limits_ms"),
    [
        ("Qwen3-0.6B", 0.596, {1: 0.29, 16: 0.39, 64: 0.73}),
        ("Qwen3-8B", 8.19, {1: 3.59, 16: 3.72, 64: 4.15, 256: 7.3}),
        ("Qwen3-30B-A3B", 30.53, {1: 1.45, 16: 9.5, 64: 14.45, 256: 15.8}),
    ],
)
def test_limits_of_decoding(name: str, parameters_b: float, limits_ms: dict[int, float]) -> None:
    shape = SHAPES[name]
    everything = shape.weight_bytes(10**6) / 2 + (0 if shape.tied else shape.vocab_size * shape.hidden_size)
    assert everything / 1e9 == pytest.approx(parameters_b, rel=0.002)
    for batch, limit in limits_ms.items():
        assert shape.decode_limit_s(batch, 256, H200) * 1e3 == pytest.approx(limit, abs=0.05)
    assert AIMS[name].inter_token_ms.keys() == {1, 16, 64, 256}
    for batch, aim in AIMS[name].inter_token_ms.items():
        assert aim > shape.decode_limit_s(batch, 256, H200) * 1e3


def test_limits_of_prompts() -> None:
    dense = SHAPES["Qwen3-8B"]
    # Short ones wait for the weights, long ones for the arithmetic.
    assert dense.prompt_limit_s(128, H200) == pytest.approx(dense.weight_bytes(1) / H200.bandwidth, rel=0.02)
    assert dense.prompt_limit_s(2048, H200) * 1e3 == pytest.approx(38.6, abs=0.1)


def test_experts_touched() -> None:
    shape = SHAPES["Qwen3-30B-A3B"]
    assert shape.touched_blocks(1) == 8
    assert shape.touched_blocks(2) == pytest.approx(16 - 8 * 8 / 128)
    assert shape.touched_blocks(10**4) == pytest.approx(128)
    assert SHAPES["Qwen3-8B"].touched_blocks(7) == 1


def test_counted_weights_are_the_model_s(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY.config()))
    loaded = load_pretrained(tmp_path, device="cpu", load_format="random", progress=False)
    assert loaded.dtype == torch.bfloat16
    assert isinstance(loaded.model, CausalLM)
    matrices = [weight for name, weight in loaded.model.destinations() if "norm" not in name and "embed" not in name]
    assert TINY.weight_bytes(10**6) == sum(weight.nbytes for weight in matrices)
    cache = loaded.model.spec.cache
    assert TINY.cache_bytes(3) == 3 * 2 * 2 * cache.num_layers * cache.num_kv_heads * cache.head_size


PLAN = Plan(batches=(1, 3), prompt_lens=(5, 20), output_len=24, least_requests=2, first_tokens=2, device="cpu")


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_on_cuda, "MAX_MODEL_LEN", 128)
    monkeypatch.setattr(text_on_cuda, "TRACED_STEPS", 5)


def test_a_run_measures_every_configuration(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, trace=tmp_path / "trace.json")
    report = asyncio.run(measure_model("tiny", TINY, H200, plan))
    assert report.conditions["errors"] == {}
    figures = {figure.name: figure for figure in report.figures}
    for batch, count in ((1, 2), (3, 3)):
        for kind in ("greedy", "sampled"):
            assert figures[f"batch {batch}, {kind}: inter-token"].count == count
            assert 1 <= figures[f"batch {batch}, {kind}: tokens per event"].median <= 24
            assert figures[f"batch {batch}, {kind}: throughput"].min > 0
    for length in (5, 20):
        assert figures[f"first token after {length}"].count == 2
    assert 0 < figures["start: until the engine is entered"].median < figures["start: until its first token"].median
    for ratio in report.ratios:
        name = ratio.name.removesuffix(": limit / measured")
        assert ratio.value == pytest.approx(figures[f"{name}: limit"].median / figures[name].median)
    assert len(report.ratios) == 6
    for batch in (1, 3):
        trace = json.loads((tmp_path / f"tiny-{batch}-trace.json").read_text())
        assert sum(event.get("name") == "aten::argmax" for event in trace["traceEvents"]) >= 1

    lines = latency_lines("tiny", dataclasses.asdict(report))
    assert lines["tiny"] == {batch: figures[f"batch {batch}, greedy: inter-token"].median for batch in (1, 3)}
    assert lines.keys() == {"tiny", "tiny: limit"}


def test_reports_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures = [
        Figure.of(f"batch {batch}, greedy: inter-token{kind}", "ms", [batch * scale], aim=aim)
        for batch in (1, 16, 256)
        for kind, scale, aim in (("", 0.01, batch * 0.008), (": limit", 0.005, None))
    ]
    report = Report(name="text_on_cuda_tiny", figures=figures, conditions={})
    lines = latency_lines("tiny", dataclasses.asdict(report))
    assert lines["tiny: aim"] == {1: 0.008, 16: 0.128, 256: 2.048}
    path = report.write(tmp_path, Environment.here(0, quick=True))
    draw([str(path), "--out", str(tmp_path / "latency.png")])
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


def test_a_failure_is_reported_and_the_rest_is_measured() -> None:
    plan = dataclasses.replace(PLAN, batches=(1,), prompt_lens=(5, 500))
    report = asyncio.run(measure_model("tiny", TINY, H200, plan))
    errors = report.conditions["errors"]
    assert isinstance(errors, dict)
    assert errors.keys() == {"first token after 500"}
    assert "PromptTooLong" in errors["first token after 500"]
    names = [figure.name for figure in report.figures]
    assert {"first token after 5", "batch 1, sampled: inter-token"} <= set(names)


def test_an_engine_that_does_not_start_is_reported() -> None:
    broken = dataclasses.replace(TINY, architecture="NoSuchModel")
    report = asyncio.run(measure_model("tiny", broken, H200, PLAN))
    errors = report.conditions["errors"]
    assert isinstance(errors, dict)
    assert "NoSuchModel" in errors["the engine"]
    assert "copy bandwidth" in report.table()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("main", [text_on_cuda.main, run_kernels])
def test_without_a_device_the_command_line_says_so(main: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(main)
    with pytest.raises(SystemExit):
        main([])
    assert "needs a CUDA device" in capsys.readouterr().err


def test_the_kernels_command_line_says_what_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_kernels(["attention", "no_such_kernel"])
    assert "['no_such_kernel']; there are attention" in capsys.readouterr().err
