"""What a block held before must not reach its next owner, nor a neighbour in the same step: not even a NaN."""

import anyio
import pytest
import torch
from transformers import LlamaConfig

from omni_async import Engine, Generation, NonFiniteLogits, Request, SamplingParams
from omni_async.models.registry import ARCHITECTURES
from tests.support.engines import becomes_idle, scripted_engine
from tests.support.tiny import SIZES, as_weights, make_reference, token_ids

pytestmark = pytest.mark.anyio

POISON = 7
"""A token whose embedding is not a number, so its keys and values are none either."""


@pytest.fixture
def anyio_backend() -> str:
    """The kind of the caller's loop plays no part here."""
    return "asyncio"


def poisoned_model() -> object:
    config = LlamaConfig(**SIZES)
    reference = make_reference(config, seed=2)
    with torch.no_grad():
        reference.model.embed_tokens.weight[POISON] = torch.nan
    model = ARCHITECTURES["LlamaForCausalLM"](config, dtype=torch.float32, device=torch.device("cpu"))
    model.load(as_weights({k: v for k, v in reference.state_dict().items() if "rotary" not in k}))
    return model


def prompt(length: int, seed: int) -> list[int]:
    return [token if token != POISON else POISON + 1 for token in token_ids(length, SIZES["vocab_size"], seed=seed)]


async def ask(engine: Engine, ids: list[int]) -> Generation:
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logit_bias={POISON: -1e4})
    return await engine.generate(Request(prompt_token_ids=ids, sampling=sampling))


@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_blocks_that_held_no_numbers_are_used_again(prefix_caching: bool) -> None:
    async with scripted_engine(
        poisoned_model(),  # type: ignore[arg-type]
        with_tokenizer=False,
        max_model_len=96,
        num_blocks=6,
        max_step_tokens=24,
        prefix_caching=prefix_caching,
    ) as engine:
        prompts = [prompt(length, seed) for seed, length in enumerate((1, 20, 45))]
        expected = [(await ask(engine, ids)).token_ids for ids in prompts]
        assert all(len(set(ids)) >= 8 for ids in expected)
        for at in (0, 10, 39):  # fills blocks with NaN from there on
            bad = prompt(40, 9)
            bad[at] = POISON
            for ids, wanted in zip(prompts, expected, strict=True):
                with pytest.raises(NonFiniteLogits, match="40 tokens"):
                    await ask(engine, bad)
                assert (await ask(engine, ids)).token_ids == wanted
        await becomes_idle(engine)


async def test_a_neighbour_in_the_same_step_is_unharmed() -> None:
    async with scripted_engine(poisoned_model(), with_tokenizer=False) as engine:  # type: ignore[arg-type]
        good = prompt(30, 1)
        expected = (await ask(engine, good)).token_ids
        outcomes: list[object] = []

        async def note(ids: list[int]) -> None:
            try:
                outcomes.append((await ask(engine, ids)).token_ids)
            except NonFiniteLogits as error:
                outcomes.append(type(error))

        async with anyio.create_task_group() as group:
            for ids in (good, [1, POISON, 2], [*good, 3], [POISON], good):
                group.start_soon(note, ids)
        assert outcomes.count(NonFiniteLogits) == 2
        assert outcomes.count(expected) == 2
        await becomes_idle(engine)
