"""Whatever is put into a field of a request or an option: it is taken, or refused with this package's own error."""

import array
import dataclasses
import decimal
from collections.abc import Callable

import numpy as np
import pytest
import torch

from omni_async import EngineOptions, OptionError, Request, RequestError, SamplingParams

GARBAGE: list[object] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**400, -(10**400), 0.5, -0.5, float("nan"), float("inf"),
    5e-324, 1e308, 1j, "", "a", "\ud800", "\0", "x" * 10_000, b"x", bytearray(b"x"), memoryview(b"x"),
    [], [1], ["a"], ["", 1], [None], [[1]], [{}], [{"role": 1}], [{"role": "user", "content": 1}], (1, 2), set(), {1},
    {"text"}, {}, {1: 2}, {"a": 1}, {1: float("nan")}, {1: 10**400}, {True: 1}, {-1: 1.0}, {1: SamplingParams()},
    {"text": SamplingParams()}, {"text": 1}, range(3), iter([1]), array.array("i", [1]), object(), int, print,
    decimal.Decimal(1), np.int64(3), np.float64(0.5), np.float32(0.5), np.array(3), torch.tensor(1), SamplingParams(),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "own", "given"),
    [(SamplingParams, RequestError, {}), (Request, RequestError, {"prompt": "x"}), (EngineOptions, OptionError, {})],
)
def test_garbage_in_each_field(
    make: Callable[..., SamplingParams | Request | EngineOptions], own: type[Exception], given: dict[str, object]
) -> None:
    for field in dataclasses.fields(make):  # type: ignore[arg-type]
        refusals: list[str] = []
        for value in GARBAGE:
            others = {} if field.name in ("prompt_token_ids", "messages") else given
            try:
                make(**{**others, field.name: value})
            except own as error:
                refusals.append(str(error))
        assert refusals, f"{field.name} takes anything"
        assert all(refusals)
