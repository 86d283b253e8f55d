"""The engine on a CUDA device: the ids of the CPU in float32, by either backend, with graphs and without."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from omni_async import CaptureError, Engine, EngineOptions, Generation, Request, SamplingParams, StepFailed
from omni_async.backend.triton import TritonOps
from omni_async.loading.loaded import GenerationDefaults, Loaded
from omni_async.models.registry import ARCHITECTURES
from tests.support.engines import becomes_idle
from tests.support.tiny import SIZES, make_reference, reference_logits, saved_weights, token_ids

# The first engine compiles its kernels, if no earlier run has left them in Triton's cache.
pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(300)]

CONFIGS: dict[str, PretrainedConfig] = {
    "dense": Qwen3Config(**SIZES, head_dim=16),
    "experts": Qwen3MoeConfig(
        **SIZES, head_dim=16, moe_intermediate_size=48, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True
    ),
}
PROMPTS = [token_ids(length, 320, seed) for seed, length in enumerate((1, 15, 16, 17, 133))]
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1, max_tokens=24),
    SamplingParams(temperature=1.1, min_p=0.02, repetition_penalty=1.3, seed=2, max_tokens=24),
    SamplingParams(
        temperature=0.0, frequency_penalty=1.0, logit_bias={5: 3.0}, min_tokens=3, logprobs=2, max_tokens=24
    ),
    SamplingParams(temperature=1.0, allowed_token_ids=list(range(50, 90)), seed=3, max_tokens=24),
    SamplingParams(temperature=0.9, top_p=0.9, seed=4, logprobs=25, prompt_logprobs=1, max_tokens=6),
]
WAYS: list[dict[str, Any]] = [
    {"backend": "reference"},
    {"backend": "triton", "capture": False},
    {"backend": "triton"},
    {"backend": "triton", "pipelined": False},
    # Some prompts are larger than any graph, others come in chunks beside the decoding rows.
    {"backend": "triton", "max_step_tokens": 24, "num_blocks": 40},
]


def make_engine(
    config: PretrainedConfig, device: str, folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any
) -> Engine:
    reference = make_reference(config, seed=3)
    weights = saved_weights(reference, folder)
    architecture = type(reference).__name__

    def load(_: EngineOptions) -> Loaded:
        model = ARCHITECTURES[architecture](config, dtype=dtype, device=torch.device(device))
        model.load(weights)
        return Loaded(
            model=model,
            tokenizer=None,
            defaults=GenerationDefaults(),
            name="tiny",
            dtype=dtype,
            device=torch.device(device),
        )

    sizes = {"max_slots": 4, "num_blocks": 128, "max_step_tokens": 64, "max_model_len": 256}
    return Engine(load, EngineOptions(**(sizes | options)))


async def answers(engine: Engine, requests: list[Request]) -> list[Generation]:
    results: dict[int, Generation] = {}

    async def ask(i: int) -> None:
        results[i] = await engine.generate(requests[i])

    async with anyio.create_task_group() as group:
        for i in range(len(requests)):
            group.start_soon(ask, i)
    await becomes_idle(engine)
    return [results[i] for i in range(len(requests))]


def all_requests() -> list[Request]:
    return [Request(prompt_token_ids=prompt, sampling=sampling) for prompt in PROMPTS for sampling in SAMPLINGS]


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    """Any torch call that waits for the device raises."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_ids_equal_those_of_the_cpu(way: dict[str, Any], tmp_path: Path) -> None:
    async with make_engine(CONFIGS["dense"], "cpu", tmp_path) as engine:
        on_cpu = await answers(engine, all_requests())
    async with make_engine(CONFIGS["dense"], "cuda", tmp_path, **way) as engine:
        on_cuda = await answers(engine, all_requests())
    for ours, theirs in zip(on_cuda, on_cpu, strict=True):
        assert ours.token_ids == theirs.token_ids
        if ours.logprobs is not None and theirs.logprobs is not None:
            for one, two in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert one.logprob == pytest.approx(two.logprob, abs=1e-3)
                assert [t.token_id for t in one.top] == [t.token_id for t in two.top]
        mine, other = (each.completions[0].finished.prompt_logprobs for each in (ours, theirs))
        assert (mine is None) == (other is None)
        for one, two in zip(mine or (), other or (), strict=True):
            assert (one is None) == (two is None)
            if one is not None and two is not None:
                assert one.logprob == pytest.approx(two.logprob, abs=1e-3)


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_ids_with_a_float8_cache_equal_those_of_the_cpu(way: dict[str, Any], tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=0.0, logprobs=2, max_tokens=24)
    requests = [Request(prompt_token_ids=prompt, sampling=sampling) for prompt in PROMPTS]
    results: dict[str, list[Generation]] = {}
    for device, options in (("cpu", {}), ("cuda", way)):
        folder = tmp_path / device
        async with make_engine(CONFIGS["dense"], device, folder, cache_dtype="float8_e4m3", **options) as engine:
            results[device] = await answers(engine, requests)
    num_equal = 0
    for ours, theirs in zip(results["cuda"], results["cpu"], strict=True):
        parted = [i for i, pair in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)) if pair[0] != pair[1]]
        num_equal += not parted
        if parted:
            # A key between two numbers of float8 becomes either, by the last bit of its sum: little, but not nothing.
            assert theirs.logprobs is not None
            best, second = theirs.logprobs[parted[0]].top
            assert best.logprob - second.logprob < 0.05
    assert num_equal >= len(requests) - 1


@pytest.mark.parametrize("way", WAYS[:3], ids=str)
async def test_greedy_ids_of_a_mixture_of_experts_equal_transformers(way: dict[str, Any], tmp_path: Path) -> None:
    config = CONFIGS["experts"]
    reference = make_reference(config, seed=3)
    async with make_engine(config, "cuda", tmp_path, **way) as engine:
        result = (await answers(engine, all_requests()))[len(SAMPLINGS) * 4]
    whole = [*PROMPTS[4], *result.token_ids]
    logits = reference_logits(reference, whole)[len(PROMPTS[4]) - 1 : -1]
    best = logits.topk(2).values
    for drawn, row, (first, second) in zip(result.token_ids, logits, best.tolist(), strict=True):
        assert drawn == int(row.argmax()) or first - second < 1e-3


@pytest.mark.parametrize("kind", CONFIGS)
async def test_greedy_ids_in_bfloat16_where_there_is_no_near_tie(kind: str, tmp_path: Path) -> None:
    reference = make_reference(CONFIGS[kind], seed=3).bfloat16().float()
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    requests = [Request(prompt_token_ids=prompt, sampling=greedy) for prompt in PROMPTS]
    async with make_engine(CONFIGS[kind], "cuda", tmp_path, dtype=torch.bfloat16) as engine:
        results = await answers(engine, requests)
    decided = 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        logits = reference_logits(reference, [*prompt, *result.token_ids])[len(prompt) - 1 : -1]
        for drawn, row, (first, second) in zip(result.token_ids, logits, logits.topk(2).values.tolist(), strict=True):
            if first - second > 0.05:
                decided += 1
                assert drawn == int(row.argmax())
    assert decided > 24 * len(PROMPTS) // 2


@pytest.mark.usefixtures("no_synchronisation")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("capture", [True, False])
async def test_a_step_never_waits_for_the_device(capture: bool, tmp_path: Path) -> None:
    requests = [r for r in all_requests() if r.sampling.prompt_logprobs is None]  # type: ignore[union-attr]
    async with make_engine(CONFIGS["experts"], "cuda", tmp_path, backend="triton", capture=capture) as engine:
        await answers(engine, requests)  # kernels are compiled at their first use
        torch.cuda.set_sync_debug_mode("error")
        again = await answers(engine, requests)
    assert all(len(generation.token_ids) == 24 for generation in again)


async def test_memory_stays_flat_over_ten_thousand_requests(tmp_path: Path) -> None:
    source = torch.Generator().manual_seed(0)

    def some(count: int) -> list[Request]:
        lengths = torch.randint(1, 40, (count,), generator=source).tolist()
        ids = [torch.randint(320, (length,), generator=source).tolist() for length in lengths]
        return [Request(prompt_token_ids=i, sampling=SamplingParams(max_tokens=2, seed=1)) for i in ids]

    async with make_engine(CONFIGS["dense"], "cuda", tmp_path, max_slots=32, max_waiting=4096) as engine:

        def memory() -> tuple[int, int]:
            gc.collect()  # engines of earlier tests
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

        await answers(engine, some(1000))
        before = memory()
        for _ in range(5):
            await answers(engine, some(2000))
        assert memory() == before


async def test_a_failed_capture_names_its_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits(TritonOps):
        def embedding(self, token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if torch.cuda.is_current_stream_capturing() and len(token_ids) == 48:
                token_ids.tolist()
            return super().embedding(token_ids, weight)

    monkeypatch.setattr("omni_async.backend.triton.TritonOps", Waits)
    with pytest.raises(CaptureError, match="num_tokens=48"):
        async with make_engine(CONFIGS["dense"], "cuda", tmp_path):
            pass
    monkeypatch.undo()
    async with make_engine(CONFIGS["dense"], "cuda", tmp_path) as engine:  # the device is as before
        assert len((await engine.generate(all_requests()[0])).token_ids) == 24


async def test_a_failing_step_ends_its_requests_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(TritonOps):
        def logprobs(self, *_: Any) -> Any:
            raise ArithmeticError("no scores today")

    monkeypatch.setattr("omni_async.backend.triton.TritonOps", Fails)
    async with make_engine(CONFIGS["dense"], "cuda", tmp_path) as engine:
        request = Request(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(prompt_logprobs=1, max_tokens=2))
        with pytest.raises(StepFailed, match="no scores today"):
            await engine.generate(request)
        assert len((await engine.generate(all_requests()[0])).token_ids) == 24
        await becomes_idle(engine)
