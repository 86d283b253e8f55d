"""A step that fails before it reached the device, while the next one, which names the same slot, is under way."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from omni_async import Engine, EngineOptions, Request, SamplingParams, StepFailed
from omni_async.backend.slot_tables import SlotTables
from omni_async.loading.loaded import GenerationDefaults, Loaded
from omni_async.models.registry import ARCHITECTURES
from omni_async.runner.device_state import DeviceState
from omni_async.runner.step_shape import StepShape
from omni_async.sampling.table import SamplingTable
from tests.support.engines import becomes_idle
from tests.support.tiny import SIZES, make_reference, saved_weights, token_ids

pytestmark = pytest.mark.anyio

CONFIG = Qwen3Config(**SIZES, head_dim=16)


@pytest.fixture
def anyio_backend() -> str:
    """The kind of the caller's loop plays no part here."""
    return "asyncio"


def make_engine(folder: Path, *, pipelined: bool) -> Engine:
    reference = make_reference(CONFIG, seed=3)
    weights = saved_weights(reference, folder)

    def load(_: EngineOptions) -> Loaded:
        device = torch.device("cpu")
        model = ARCHITECTURES[type(reference).__name__](CONFIG, dtype=torch.float32, device=device)
        model.load(weights)
        return Loaded(
            model=model, tokenizer=None, defaults=GenerationDefaults(), name="t", dtype=torch.float32, device=device
        )

    options = EngineOptions(
        max_slots=2, num_blocks=64, max_step_tokens=24, max_model_len=256, pipelined=pipelined, backend="reference"
    )
    return Engine(load, options)


def asking(length: int, seed: int, max_tokens: int = 24) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Request(prompt_token_ids=token_ids(length, 320, seed), sampling=sampling)


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("failing", ["the newcomer's parameters", "the newcomer's tokens", "a decoding step's rows"])
async def test_it_leaves_other_requests_blocks_alone(
    failing: str, pipelined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    states: list[DeviceState] = []
    made = DeviceState.__init__

    def remember(self: DeviceState, *arguments: object) -> None:
        states.append(self)
        made(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceState, "__init__", remember)
    async with make_engine(tmp_path, pipelined=pipelined) as engine:
        # The slot's table keeps what it held of the first request behind the few blocks of the second.
        first = await engine.generate(asking(140, 1))
        await engine.generate(asking(20, 7, max_tokens=4))

        def fails(*_: object) -> None:
            nonlocal calls
            calls += 1
            raise MemoryError("no pinned memory")

        def fails_at_a_new_block(self: StepShape, rows: object, gained: object) -> object:
            if gained:
                fails()
            return packs(self, rows, gained)  # type: ignore[arg-type]

        packs = StepShape.pack
        with monkeypatch.context() as patch:
            if failing == "the newcomer's parameters":
                patch.setattr(SamplingTable, "entries", fails)
            elif failing == "the newcomer's tokens":
                patch.setattr(SlotTables, "pack", fails)
            else:
                patch.setattr(StepShape, "pack", fails_at_a_new_block)
            with pytest.raises(StepFailed, match="no pinned memory"):
                await engine.generate(asking(100, 2))
            await becomes_idle(engine)
        assert calls == 1
        again = await engine.generate(asking(140, 1))
        assert again.usage.cached_tokens == 128
        assert again.token_ids == first.token_ids
        await becomes_idle(engine)
    for keys, values in states[-1].caches:  # nobody owns block 0
        assert not keys[0].any()
        assert not values[0].any()
