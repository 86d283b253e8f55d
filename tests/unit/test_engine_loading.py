"""A checkpoint's faults show when the engine is entered, and its heads are those that the config says."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_async import CheckpointError, Engine, EngineClosed, EngineOptions, LoadError, Request, SamplingParams
from omni_async.loading.loaded import Loaded
from tests.support.checkpoints import save_folder, tiny_config

pytestmark = pytest.mark.anyio

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def anyio_backend() -> str:
    """The kind of the caller's loop plays no part here."""
    return "asyncio"


def engine_of(folder: Path) -> Engine:
    return Engine.from_pretrained(folder, device="cpu", progress=False, num_blocks=32)


async def answer(folder: Path) -> tuple[int, ...]:
    async with engine_of(folder) as engine:
        sampling = SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=24, ignore_eos=True)
        request = Request(prompt="abc", sampling=sampling)
        return (await engine.generate(request)).token_ids


async def test_a_stored_copy_of_a_tied_head_changes_no_answer(tmp_path: Path) -> None:
    save_folder(tmp_path, tiny_config(tie_word_embeddings=True))
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    absent = await answer(tmp_path)
    assert len(set(absent)) >= 8
    save_file({**stored, HEAD: stored[EMBEDDING].clone()}, file)
    assert await answer(tmp_path) == absent
    save_file({**stored, HEAD: stored[EMBEDDING].flip(0)}, file)
    with pytest.warns(UserWarning, match="differs"):
        assert await answer(tmp_path) == absent


def remove(shard: Path) -> None:
    shard.unlink()


def halve(shard: Path) -> None:
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])


def lose_a_tensor(shard: Path) -> None:
    tensors = load_file(shard)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, shard)


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    save_folder(tmp_path, tiny_config(), max_shard_size="150KB")
    return sorted(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("damage", [remove, halve, lose_a_tensor])
async def test_a_damaged_shard_is_named_before_anything_is_served(
    damage: Callable[[Path], None], shards: list[Path], no_threads_left: None
) -> None:
    assert len(shards) >= 3
    inside = list(load_file(shards[1]))
    damage(shards[1])
    engine = engine_of(shards[1].parent)
    with pytest.raises(CheckpointError) as caught:
        async with engine:
            raise AssertionError("not reached")
    assert shards[1].name in str(caught.value)
    assert damage is halve or any(tensor in str(caught.value) for tensor in inside)
    with pytest.raises(EngineClosed, match="did not start"):
        engine.stream(Request(prompt="abc"))


async def test_weights_that_do_not_fit_are_a_load_error() -> None:
    def load(_: EngineOptions) -> Loaded:
        raise torch.OutOfMemoryError("tried to allocate 61 GiB, 12 GiB are free")

    with pytest.raises(LoadError, match="weights do not fit.* 61 GiB, 12 GiB are free"):
        async with Engine(load, EngineOptions()):
            pass
