"""The cases of `omni-async bench kernels`, small and on the CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from omni_async.backend.ops import Ops
from omni_async.backend.reference.ops import ReferenceOps
from omni_async.measure import kernels
from omni_async.measure.ceilings import Ceilings
from omni_async.measure.kernels import CASES, Case, KernelTime, measure_kernels

ROW = 8 * 128 * 2
"""Bytes of the keys of one position."""


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "DEVICE", "cpu")


@pytest.mark.parametrize(
    ("make", "shape", "num_bytes", "flops"),
    [
        (partial(kernels.rms_norm, 3, 16), (3, 16), 2 * 96, 0),
        (partial(kernels.silu_and_mul, 3, 16), (3, 16), 3 * 96, 0),
        (partial(kernels.linear, 2, 8, 5), (2, 5), 2 * (16 + 40 + 10), 160),
        (partial(kernels.attention, 3, 1, 32), (3, 32, 128), 3 * (80 * 256 + 64 * ROW), 4 * 32 * 128 * 96),
        (partial(kernels.attention, 1, 16, 16), (16, 32, 128), 16 * (80 * 256 + 2 * ROW), 4 * 32 * 128 * 136),
    ],
)
def test_a_case_works_and_counts(
    make: Callable[[Ops], Case], shape: tuple[int, ...], num_bytes: int, flops: float
) -> None:
    case = make(ReferenceOps())
    result: Any = case.work()
    out = result[0] if isinstance(result, tuple) else result
    assert out.shape == shape
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()
    assert (case.num_bytes, case.flops) == (num_bytes, flops)


def test_a_time_is_compared_with_the_longer_of_bytes_and_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.timing, "samples_ms", lambda work, repeats_ms: [0.004, 0.002, 0.003])
    monkeypatch.setattr(kernels, "CASES", {"a": lambda ops: Case(lambda: None, 100, 0), "b": lambda ops: CASES_B})
    ceilings = Ceilings(bandwidth=1e8, rate=1e9)
    [a, b] = measure_kernels(ReferenceOps(), ceilings, 1, ["a", "b"])
    assert (a, b) == (KernelTime("a", 3.0, pytest.approx(1.0)), KernelTime("b", 3.0, pytest.approx(2.0)))
    assert a.share == pytest.approx(1 / 3)


CASES_B = Case(lambda: None, 100, 2000)


def test_the_main_kernels_are_entered() -> None:
    assert {name.split(",")[0] for name in CASES} >= {"rms_norm", "silu_and_mul", "attention", "linear"}
