"""An engine that keeps keys and values in float8: the ids of `transformers` with a cache that rounds alike."""

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3Config

from omni_async import Engine, EngineOptions, Generation, OptionError, Request, SamplingParams
from omni_async.models.registry import ARCHITECTURES
from tests.support.checkpoints import save_folder, tiny_config
from tests.support.engines import becomes_idle, scripted_engine
from tests.support.tiny import SIZES, as_weights, make_reference, reference_logits, token_ids

pytestmark = pytest.mark.anyio

CONFIG = Qwen3Config(**SIZES, head_dim=16)
REFERENCE = make_reference(CONFIG, seed=3)
PROMPTS = [token_ids(length, 320, seed) for seed, length in enumerate((1, 45, 16, 70))]
NUM_TOKENS = 16


@pytest.fixture
def anyio_backend() -> str:
    """The kind of the caller's loop plays no part here."""
    return "asyncio"


class RoundingCache(DynamicCache):
    """What it gives back went through float8."""

    def update(self, keys: Tensor, values: Tensor, *args: Any, **more: Any) -> Any:
        rounded = (x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) for x in (keys, values))
        return super().update(*rounded, *args, **more)


@torch.inference_mode()
def rounded_logits(ids: list[int]) -> Tensor:
    """Logits `[n, V]` at every position."""
    logits: Tensor = REFERENCE(input_ids=torch.tensor([ids]), past_key_values=RoundingCache(), use_cache=True).logits[0]
    return logits


def greedy(prompt: list[int]) -> tuple[int, ...]:
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        ids.append(int(rounded_logits(ids)[-1].argmax()))
    return tuple(ids[len(prompt) :])


EXPECTED = [greedy(prompt) for prompt in PROMPTS]


def make_model() -> Any:
    model = ARCHITECTURES["Qwen3ForCausalLM"](CONFIG, dtype=torch.float32, device=torch.device("cpu"))
    model.load(as_weights({k: v for k, v in REFERENCE.state_dict().items() if "rotary" not in k}))
    return model


def engine(**options: Any) -> Engine:
    settings = {"with_tokenizer": False, "max_model_len": 128, "num_blocks": 64, "cache_dtype": "float8_e4m3"}
    return scripted_engine(make_model(), **(settings | options))


async def ask(engine: Engine, prompt: list[int], **sampling: Any) -> Generation:
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": NUM_TOKENS, **sampling})
    return await engine.generate(Request(prompt_token_ids=prompt, sampling=params))


async def ask_all(engine: Engine) -> list[tuple[int, ...]]:
    results: dict[int, tuple[int, ...]] = {}

    async def one(i: int) -> None:
        results[i] = (await ask(engine, PROMPTS[i])).token_ids

    async with anyio.create_task_group() as group:
        for i in range(len(PROMPTS)):
            group.start_soon(one, i)
    await becomes_idle(engine)
    return [results[i] for i in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pipelined": False},
        {"max_step_tokens": 8},
        {"prefix_caching": False},
        {"num_blocks": 6, "max_model_len": 96},  # too few for all: some are preempted
    ],
    ids=str,
)
async def test_ids_equal_transformers(options: dict[str, Any]) -> None:
    assert all(len(set(ids)) >= 8 for ids in EXPECTED)
    async with engine(**options) as e:
        assert await ask_all(e) == EXPECTED
        assert ("num_blocks" in options) == (e.stats()["text"].preemptions > 0)


async def test_ids_after_a_prefix_was_found_are_those_without() -> None:
    async with engine() as e:
        for cached in (0, 64):
            found = await ask(e, PROMPTS[3])
            assert found.token_ids == EXPECTED[3]
            assert found.usage.cached_tokens == cached


async def test_logprobs_are_those_of_rounded_keys_and_values() -> None:
    """What is rounded is not nothing: the same prompt scores differently in the run dtype."""
    prompt = PROMPTS[3]
    scores: dict[str, Tensor] = {}
    for cache_dtype in ("auto", "float8_e4m3"):
        async with engine(cache_dtype=cache_dtype) as e:
            entries = (await ask(e, prompt, prompt_logprobs=0)).completions[0].finished.prompt_logprobs
            assert entries is not None
            scores[cache_dtype] = torch.tensor([entry.logprob for entry in entries[1:] if entry is not None])
    at = torch.tensor(prompt[1:])[:, None]
    for cache_dtype, logits in (("auto", reference_logits(REFERENCE, prompt)), ("float8_e4m3", rounded_logits(prompt))):
        truth = logits[:-1].log_softmax(-1).gather(1, at)[:, 0]
        # Where a value lies between two of float8, its last bit decides which it becomes.
        assert ((scores[cache_dtype] - truth).abs() < 1e-3).float().mean() > 0.9
        torch.testing.assert_close(scores[cache_dtype], truth, rtol=0, atol=0.2)
    assert (scores["auto"] - scores["float8_e4m3"]).abs().mean() > 0.01


@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
async def test_the_same_memory_holds_more_blocks(dtype: Any, times: int, tmp_path: Path) -> None:
    save_folder(tmp_path, tiny_config())
    blocks: dict[str, int] = {}
    for cache_dtype in ("auto", "float8_e4m3"):
        async with Engine.from_pretrained(
            tmp_path,
            device="cpu",
            dtype=dtype,
            cache_dtype=cache_dtype,  # type: ignore[arg-type]
            cache_memory=2**17,
            max_slots=64,
            progress=False,
        ) as e:
            blocks[cache_dtype] = e.stats()["text"].blocks_total
            sampling = SamplingParams(max_tokens=4, ignore_eos=True)
            assert len((await e.generate(Request(prompt="abc", sampling=sampling))).token_ids) == 4
    assert blocks["float8_e4m3"] == times * blocks["auto"] > 0


@pytest.mark.parametrize("value", ["float8", "fp8", "bfloat16", "float8_e5m2", None, torch.float8_e4m3fn])
def test_an_unknown_cache_dtype_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="cache_dtype must be 'auto' or 'float8_e4m3', got"):
        EngineOptions(cache_dtype=value)
