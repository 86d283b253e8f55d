"""Ids from a whole engine over a real tiny model: equal to a plain loop, whatever else goes on.

The plain loop is `transformers`' logits, the penalties written out, and argmax; nothing of this package.
"""

import anyio
import pytest
import torch
from transformers import Qwen3Config

from omni_async import Engine, Generation, Request, SamplingParams, TextDelta
from omni_async.models.registry import ARCHITECTURES
from tests.support.engines import becomes_idle, scripted_engine
from tests.support.tiny import SIZES, as_weights, make_reference, reference_logits, token_ids

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The kind of the caller's loop plays no part here."""
    return "asyncio"


CONFIG = Qwen3Config(**SIZES, head_dim=16)
REFERENCE = make_reference(CONFIG, seed=3)
VOCAB = CONFIG.vocab_size


def make_model() -> object:
    model = ARCHITECTURES["Qwen3ForCausalLM"](CONFIG, dtype=torch.float32, device=torch.device("cpu"))
    model.load(as_weights({k: v for k, v in REFERENCE.state_dict().items() if "rotary" not in k}))
    return model


MODEL = make_model()


def engine(**options: object) -> Engine:
    settings = {"with_tokenizer": False, "max_model_len": 256, "num_blocks": 256, **options}
    return scripted_engine(MODEL, **settings)  # type: ignore[arg-type]


def greedy_loop(
    prompt: list[int], count: int, repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0
) -> tuple[int, ...]:
    ids = list(prompt)
    for _ in range(count):
        logits = reference_logits(REFERENCE, ids)[-1].double()
        for token in set(ids):
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        answer = ids[len(prompt) :]
        for token in set(answer):
            logits[token] -= presence + frequency * answer.count(token)
        ids.append(int(logits.argmax()))
    return tuple(ids[len(prompt) :])


PROMPT = token_ids(20, VOCAB, seed=1)
OTHER = token_ids(33, VOCAB, seed=12)


async def ask(engine: Engine, prompt: list[int], **sampling: object) -> Generation:
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return await engine.generate(Request(prompt_token_ids=prompt, sampling=params))


async def test_greedy_ids_equal_the_plain_loop() -> None:
    expected = greedy_loop(PROMPT, 48)
    assert len(set(expected)) >= 8
    for pipelined in (True, False):
        async with engine(pipelined=pipelined) as e:
            assert (await ask(e, PROMPT, max_tokens=48)).token_ids == expected


@pytest.mark.parametrize(
    "penalties", [{"repetition_penalty": 1.5}, {"frequency_penalty": 1.0}, {"presence_penalty": 1.5}]
)
async def test_a_penalised_request_joins_a_running_one(penalties: dict[str, float]) -> None:
    plain = greedy_loop(PROMPT, 40)
    short = {key.removesuffix("_penalty"): value for key, value in penalties.items()}
    penalised = greedy_loop(OTHER, 32, **short)
    assert penalised != greedy_loop(OTHER, 32)

    async def both(
        first: list[int], then: list[int], first_args: dict[str, object], then_args: dict[str, object]
    ) -> None:
        async with engine(max_slots=2) as e:
            results: dict[str, tuple[int, ...]] = {}

            async def follow() -> None:
                results["then"] = (await ask(e, then, **then_args)).token_ids

            ids: list[int] = []
            request = Request(
                prompt_token_ids=first,
                sampling=SamplingParams(temperature=0.0, ignore_eos=True, **first_args),  # type: ignore[arg-type]
            )
            async with anyio.create_task_group() as group, e.stream(request) as events:
                started = False
                async for event in events:
                    if isinstance(event, TextDelta):
                        ids += event.token_ids
                        if len(ids) >= 5 and not started:
                            started = True
                            group.start_soon(follow)
            results["first"] = tuple(ids)
            for prompt, key in ((first, "first"), (then, "then")):
                assert results[key] == (plain if prompt is PROMPT else penalised)
            await becomes_idle(e)

    plain_args: dict[str, object] = {"max_tokens": 40}
    penalised_args: dict[str, object] = {"max_tokens": 32, **penalties}
    await both(PROMPT, OTHER, plain_args, penalised_args)
    await both(OTHER, PROMPT, penalised_args, plain_args)


async def test_a_penalised_request_is_preempted_and_resumes() -> None:
    expected = greedy_loop(OTHER, 32, repetition=1.5)
    async with engine(max_slots=1) as e:
        request = Request(
            prompt_token_ids=OTHER,
            priority=1,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=32, repetition_penalty=1.5),
        )
        ids: list[int] = []
        async with e.stream(request) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    ids += event.token_ids
                    if len(ids) < 12:
                        await ask(e, [9, 8, 7], max_tokens=2)
        assert e.stats()["text"].preemptions > 0
        assert tuple(ids) == expected


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
@pytest.mark.parametrize("together", [False, True])
async def test_a_prompt_that_is_wholly_in_the_prefix_cache(length: int, together: bool) -> None:
    prompt = token_ids(length, VOCAB, seed=length)
    expected = greedy_loop(prompt, 8)
    least, most = {15: (0, 0), 16: (0, 15), 17: (16, 16), 32: (16, 31), 33: (32, 32)}[length]
    async with engine() as e:
        for _ in range(3):
            if together:
                results: list[Generation] = []

                async def one(results: list[Generation] = results) -> None:
                    results.append(await ask(e, prompt, max_tokens=8))

                async with anyio.create_task_group() as group:
                    group.start_soon(one)
                    group.start_soon(one)
            else:
                results = [await ask(e, prompt, max_tokens=8)]
            for result in results:
                assert result.token_ids == expected
                assert result.usage.cached_tokens <= most
        assert all(result.usage.cached_tokens >= least for result in results)
    async with engine(prefix_caching=False) as e:
        for _ in range(2):
            result = await ask(e, prompt, max_tokens=8)
            assert (result.token_ids, result.usage.cached_tokens) == (expected, 0)


async def test_answers_are_shared_as_prefixes_of_the_next_turn() -> None:
    async with engine() as e:
        first = await ask(e, PROMPT, max_tokens=30)
        turn = [*PROMPT, *first.token_ids, 5, 6, 7]
        second = await ask(e, turn, max_tokens=10)
        assert second.token_ids == greedy_loop(turn, 10)
        assert second.usage.cached_tokens == 48


@pytest.mark.parametrize("pipelined", [True, False])
async def test_a_cache_for_one_and_a_half_requests(pipelined: bool) -> None:
    prompts = [token_ids(24, VOCAB, seed=seed) for seed in range(3)]
    expected = [greedy_loop(prompt, 40) for prompt in prompts]
    async with engine(num_blocks=6, max_model_len=64, pipelined=pipelined) as e:
        results: dict[int, Generation] = {}

        async def one(i: int) -> None:
            results[i] = await ask(e, prompts[i], max_tokens=40)

        async with anyio.create_task_group() as group:
            for i in range(3):
                group.start_soon(one, i)
        assert [results[i].token_ids for i in range(3)] == expected
        assert all(results[i].usage.completion_tokens == 40 for i in range(3))
        await becomes_idle(e)


@pytest.mark.parametrize("step_tokens", [8, 16, 64])
async def test_prompts_in_chunks_beside_decoding(step_tokens: int) -> None:
    prompts = [token_ids(length, VOCAB, seed=length) for length in (1, 15, 40, 100)]
    expected = [greedy_loop(prompt, 12) for prompt in prompts]
    async with engine(max_step_tokens=step_tokens) as e:
        results: dict[int, Generation] = {}

        async def one(i: int) -> None:
            results[i] = await ask(e, prompts[i], max_tokens=12)

        async with anyio.create_task_group() as group:
            for i in range(4):
                group.start_soon(one, i)
        assert [results[i].token_ids for i in range(4)] == expected


async def test_a_seed_gives_the_same_ids_in_any_company() -> None:
    sampling = {"temperature": 0.8, "max_tokens": 16, "seed": 42}
    async with engine() as e:
        alone = (await ask(e, PROMPT, **sampling)).token_ids
        assert alone != greedy_loop(PROMPT, 16)

        async def company(before: int, after: int, seeded: bool, top_k: int) -> tuple[int, ...]:
            results: list[tuple[int, ...]] = []

            async def neighbour(i: int) -> None:
                seed = {"seed": i} if seeded else {}
                await ask(
                    e, token_ids(i + 1, VOCAB, seed=i), temperature=1.3, top_k=top_k, max_tokens=3 + 2 * i, **seed
                )

            async def measured() -> None:
                results.append((await ask(e, PROMPT, **sampling)).token_ids)

            async with anyio.create_task_group() as group:
                for i in range(before):
                    group.start_soon(neighbour, i)
                group.start_soon(measured)
                for i in range(after):
                    group.start_soon(neighbour, 10 + i)
            return results[0]

        for before, after, seeded in ((0, 1, False), (1, 0, False), (1, 1, True), (4, 3, False), (7, 0, True)):
            for top_k in (0, 5):  # a filter of one row sends all rows through other code
                assert await company(before, after, seeded, top_k) == alone
        others = [(await ask(e, PROMPT, temperature=0.8, max_tokens=16, seed=s)).token_ids for s in range(5)]
        assert any(ids != alone for ids in others)
        assert len(set(others)) > 1


@pytest.mark.parametrize("top_k", [VOCAB - 1, VOCAB, VOCAB + 1, 9_999_999])
async def test_top_k_around_the_vocabulary(top_k: int) -> None:
    sampling = {"temperature": 1.0, "seed": 7, "max_tokens": 8}
    async with engine() as e:
        off = (await ask(e, PROMPT, **sampling)).token_ids
        results: dict[str, tuple[int, ...]] = {}

        async def one(name: str, prompt: list[int], **sampling: object) -> None:
            results[name] = (await ask(e, prompt, **sampling)).token_ids

        async with anyio.create_task_group() as group:
            group.start_soon(lambda: one("limited", PROMPT, **sampling, top_k=top_k))
            group.start_soon(lambda: one("neighbour", OTHER, max_tokens=12))
        assert top_k < VOCAB or results["limited"] == off
        assert len(results["limited"]) == 8
        assert results["neighbour"] == greedy_loop(OTHER, 12)
        assert (await ask(e, PROMPT, **sampling)).token_ids == off


async def test_the_last_legal_id_can_be_forced() -> None:
    async with engine() as e:
        result = await ask(e, PROMPT, logit_bias={VOCAB - 1: 100.0}, max_tokens=6)
        assert result.token_ids == (VOCAB - 1,) * 6


async def test_logprobs_of_answers_and_prompts() -> None:
    async with engine(max_step_tokens=16, max_slots=4) as e:
        for wanted in (0, 1, 5, VOCAB, -1):
            result = await ask(
                e, PROMPT, temperature=1.5, seed=3, max_tokens=12, logprobs=wanted, prompt_logprobs=wanted
            )
            whole = [*PROMPT, *result.token_ids]
            truth = reference_logits(REFERENCE, whole).log_softmax(-1)
            count = VOCAB if wanted == -1 else wanted
            assert result.logprobs is not None
            prompt = result.completions[0].finished.prompt_logprobs
            assert prompt is not None
            assert prompt[0] is None
            assert len(prompt) == len(PROMPT)
            entries = [*prompt[1:], *result.logprobs]
            for position, entry in enumerate(entries):
                assert entry is not None
                row = truth[position]
                assert entry.token_id == whole[position + 1]
                assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
                assert entry.rank == 1 + int((row > row[entry.token_id] + 1e-6).sum())
                assert len(entry.top) == count
                best = row.topk(count)
                for top, value in zip(entry.top, best.values.tolist(), strict=True):
                    assert top.logprob == pytest.approx(value, abs=1e-4)
        assert sum(torch.tensor([t.logprob for t in entries[-1].top]).exp()) == pytest.approx(1, abs=1e-4)  # type: ignore[union-attr]
        await becomes_idle(e)


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-8, 1e-12])
async def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    async with engine() as e:
        results: dict[str, tuple[int, ...]] = {}

        async def one(name: str, **sampling: object) -> None:
            results[name] = (await ask(e, PROMPT, **sampling)).token_ids

        async with anyio.create_task_group() as group:
            group.start_soon(lambda: one("warm", temperature=1.0, seed=1, max_tokens=16))
            group.start_soon(lambda: one("cold", temperature=temperature, seed=1, max_tokens=16))
        if temperature <= 1e-4:
            assert results["cold"] == greedy_loop(PROMPT, 16)
        assert len(results["cold"]) == 16
