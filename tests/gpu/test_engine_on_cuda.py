"""The engine on a CUDA device, with either backend: the same ids as on the CPU, in float32."""

from pathlib import Path

import anyio
import pytest
import torch
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from omni_async import Engine, EngineOptions, Generation, Request, SamplingParams
from omni_async.loading.loaded import GenerationDefaults, Loaded
from omni_async.models.registry import ARCHITECTURES
from omni_async.options import Backend
from tests.support.engines import becomes_idle
from tests.support.tiny import SIZES, make_reference, reference_logits, saved_weights, token_ids

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

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
]


def make_engine(config: PretrainedConfig, device: str, backend: Backend, folder: Path) -> Engine:
    reference = make_reference(config, seed=3)
    weights = saved_weights(reference, folder)
    architecture = type(reference).__name__

    def load(options: EngineOptions) -> Loaded:
        model = ARCHITECTURES[architecture](config, dtype=torch.float32, device=torch.device(device))
        model.load(weights)
        return Loaded(
            model=model,
            tokenizer=None,
            defaults=GenerationDefaults(),
            name="tiny",
            dtype=torch.float32,
            device=torch.device(device),
        )

    return Engine(
        load, EngineOptions(backend=backend, max_slots=4, num_blocks=128, max_step_tokens=64, max_model_len=256)
    )


async def answers(config: PretrainedConfig, device: str, backend: Backend, folder: Path) -> list[Generation]:
    results: dict[int, Generation] = {}
    requests = [Request(prompt_token_ids=prompt, sampling=sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
    async with make_engine(config, device, backend, folder) as engine:

        async def ask(i: int) -> None:
            results[i] = await engine.generate(requests[i])

        async with anyio.create_task_group() as group:
            for i in range(len(requests)):
                group.start_soon(ask, i)
        await becomes_idle(engine)
    return [results[i] for i in range(len(requests))]


@pytest.mark.parametrize("backend", ["reference", "triton"])
async def test_ids_equal_those_of_the_cpu(backend: Backend, tmp_path: Path) -> None:
    on_cpu = await answers(CONFIGS["dense"], "cpu", "reference", tmp_path)
    on_cuda = await answers(CONFIGS["dense"], "cuda", backend, tmp_path)
    for ours, theirs in zip(on_cuda, on_cpu, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert len(ours.token_ids) == 24


@pytest.mark.parametrize("backend", ["reference", "triton"])
async def test_greedy_ids_of_a_mixture_of_experts_equal_transformers(backend: Backend, tmp_path: Path) -> None:
    config = CONFIGS["experts"]
    reference = make_reference(config, seed=3)
    result = (await answers(config, "cuda", backend, tmp_path))[len(SAMPLINGS) * 4]
    whole = [*PROMPTS[4], *result.token_ids]
    logits = reference_logits(reference, whole)[len(PROMPTS[4]) - 1 : -1]
    best = logits.topk(2).values
    for drawn, row, (first, second) in zip(result.token_ids, logits, best.tolist(), strict=True):
        assert drawn == int(row.argmax()) or first - second < 1e-3
