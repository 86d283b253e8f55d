"""What the sampler promises, seen through a whole engine: ties, small temperatures, the nucleus, log-probabilities."""

from collections.abc import Callable
from dataclasses import dataclass

import anyio
import pytest
import torch
from torch import Tensor

from omni_async import Engine, Generation, Request, SamplingParams, TextDelta
from omni_async.backend.ops import StepContext
from tests.support.engines import EOS, becomes_idle, byte_ids, scripted_engine
from tests.support.gate import Gate, all_submitted
from tests.support.scripted import Script, ScriptedModel

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The kind of the caller's loop plays no part here."""
    return "asyncio"


@dataclass
class ShapedModel(ScriptedModel):
    """Logits by a function of the scripted next ids `[S]`."""

    shape: Callable[[Tensor], Tensor] = lambda ids: ids
    most_rows: int = 0

    def logits(self, h: Tensor, step: StepContext) -> Tensor:
        self.most_rows = max(self.most_rows, len(h))
        return self.shape(h[:, 0].long())


def constant(row: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda ids: row.expand(len(ids), -1)


async def ask(engine: Engine, prompt: list[int], **sampling: object) -> Generation:
    params = SamplingParams(**{"ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return await engine.generate(Request(prompt_token_ids=prompt, sampling=params))


# -- greedy ----------------------------------------------------------------------------------------------------------


def tied() -> Tensor:
    """Ids 3 and 7 share the highest logit."""
    row = torch.sin(torch.arange(300.0))
    row[[3, 7]] = 4.0
    return row


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
async def test_a_tie_goes_to_the_lowest_id_alone_and_as_row_5_of_8(dtype: torch.dtype) -> None:
    gate = Gate(at=1)
    model = ShapedModel(shape=constant(tied().to(dtype)), on_step=gate)
    async with scripted_engine(model, max_slots=8) as engine:
        results: dict[int, tuple[int, ...]] = {}

        async def row(index: int) -> None:
            random: dict[str, object] = {"temperature": 1.0, "seed": index, "top_p": 0.9 if index % 2 else 1.0}
            sampling = {"temperature": 0.0} if index == 4 else random
            results[index] = (await ask(engine, [index], max_tokens=100, **sampling)).token_ids

        async with anyio.create_task_group() as group:
            for index in range(8):
                group.start_soon(row, index)
            await all_submitted(engine, 8)
            gate.open()
        assert model.most_rows == 8
        assert results[4] == (3,) * 100
        assert len(set(results[0])) > 2
        assert (await ask(engine, [9], temperature=0.0, max_tokens=5)).token_ids == (3,) * 5
        assert (await ask(engine, [9], temperature=9e-6, max_tokens=5)).token_ids == (3,) * 5


async def test_a_tie_goes_to_the_lowest_id_after_a_preemption() -> None:
    async with scripted_engine(ShapedModel(shape=constant(tied())), max_slots=1, max_unread_tokens=4) as engine:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=30)
        async with engine.stream(Request(prompt_token_ids=[1, 2], priority=1, sampling=sampling)) as events:
            ids: list[int] = []
            async for event in events:
                if isinstance(event, TextDelta):
                    ids += event.token_ids
                await ask(engine, [5], temperature=1.0, seed=1, max_tokens=1)
        assert engine.stats()["text"].preemptions > 0
        assert ids == [3] * 30


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-8, 1e-12])
async def test_small_temperatures_of_half_precision_logits(temperature: float, dtype: torch.dtype) -> None:
    """Two logits of 12 and 11: over 1e-4, half precision would overflow."""

    def shape(ids: Tensor) -> Tensor:
        logits = torch.zeros(len(ids), 300, dtype=dtype)
        rows = torch.arange(len(ids))
        logits[rows, ids] = 12.0
        logits[rows, (ids - 1) % 256] = 11.0
        return logits

    says = byte_ids("".join(chr(ord("a") + i % 26) for i in range(100)))
    model = ShapedModel([Script(byte_ids("?"), says)], shape=shape)
    async with scripted_engine(model) as engine:
        results: dict[str, Generation] = {}

        async def note(name: str, **sampling: object) -> None:
            results[name] = await ask(engine, byte_ids("?"), max_tokens=100, **sampling)

        async with anyio.create_task_group() as group:
            group.start_soon(lambda: note("warm", temperature=1.0, seed=1))
            group.start_soon(lambda: note("cold", temperature=temperature, seed=2, top_p=0.95))
        assert results["cold"].token_ids == tuple(says)
        assert len(results["cold"].text) == 100
        assert results["warm"].token_ids != tuple(says)
        assert len(results["warm"].token_ids) == 100


# -- the nucleus -----------------------------------------------------------------------------------------------------


def border() -> Tensor:
    """500 probabilities: the first 60 sum to 0.8999, the 61st lifts the sum to 0.9011."""
    head, tail = torch.linspace(2, 1, 60, dtype=torch.float64), torch.linspace(1, 0.5, 439, dtype=torch.float64)
    one = torch.tensor([0.0012], dtype=torch.float64)
    return torch.cat([head / head.sum() * 0.8999, one, tail / tail.sum() * 0.0989]).log().float()


def impossible(row: Tensor) -> Tensor:
    return row.masked_fill(torch.arange(len(row)) % 2 == 1, -torch.inf)


@pytest.mark.parametrize(
    ("logits", "top_p", "expected"),
    [
        (border(), 0.9, range(61)),
        (border().flip(0), 0.9, range(439, 500)),
        (torch.tensor([5.0, 1.0] + [0.0] * 298), 1e-9, range(1)),
        (torch.tensor([0.3, 0.3, 0.2, 0.1, 0.1]).log(), 0.3, range(2)),
        (torch.tensor([0.3, 0.3, 0.2, 0.1, 0.1]).log(), 0.85, range(5)),
        (torch.tensor([0.3, 0.3, 0.2, 0.15, 0.05]).log(), 0.79, range(3)),
        (impossible(torch.zeros(40)), 1.0, range(0, 40, 2)),
        (impossible(torch.zeros(40)), 0.5, range(0, 40, 2)),
    ],
    ids=["border", "border, last ids first", "one", "tie", "tie at the border", "three", "possible", "level"],
)
async def test_the_nucleus_is_the_smallest_prefix_that_reaches_top_p(
    logits: Tensor, top_p: float, expected: range
) -> None:
    model = ShapedModel(vocab_size=len(logits), shape=constant(logits))
    count = 60 if len(logits) < 500 else 120
    async with scripted_engine(
        model, with_tokenizer=False, max_slots=64, num_blocks=800, max_step_tokens=128, prefix_caching=False
    ) as engine:
        result = await ask(engine, [0], temperature=1.0, top_p=top_p, seed=7, n=64, max_tokens=count)
        drawn = {token for answer in result.completions for token in answer.token_ids}
        assert sum(len(answer.token_ids) for answer in result.completions) == 64 * count
        assert drawn == set(expected)
        await becomes_idle(engine)


# -- log-probabilities -----------------------------------------------------------------------------------------------


def rolling(ids: Tensor) -> Tensor:
    """Rather flat logits that depend on the whole context through the scripted id."""
    return 2 * torch.sin(torch.arange(300.0) * (ids[:, None] + 1))


async def test_logprobs_of_single_bytes_that_are_often_not_the_best() -> None:
    bytes_only: dict[str, object] = {
        "temperature": 1.5,
        "seed": 5,
        "max_tokens": 60,
        "allowed_token_ids": list(range(256)),
    }
    async with scripted_engine(ShapedModel(shape=rolling)) as engine:
        whole = await ask(engine, byte_ids("?"), logprobs=-1, **bytes_only)
        assert whole.logprobs is not None
        for wanted in (0, 1, 5, 300):
            result = await ask(engine, byte_ids("?"), logprobs=wanted, **bytes_only)
            assert result.token_ids == whole.token_ids
            entries = result.logprobs
            assert entries is not None
            assert tuple(entry.token_id for entry in entries) == result.token_ids
            assert b"".join(entry.bytes for entry in entries).decode(errors="replace") == result.text
            assert all(len(entry.top) == wanted for entry in entries)
            for entry, full in zip(entries, whole.logprobs, strict=True):
                larger = sum(other.logprob > full.logprob for other in full.top)
                assert entry.rank == 1 + larger
                assert entry.logprob == full.logprob
                assert entry.top == full.top[:wanted]
            outside = [e for e in entries if e.token_id not in {t.token_id for t in e.top}]
            assert bool(outside) == (wanted < 300)
        for entry in whole.logprobs:
            assert sum(torch.tensor([t.logprob for t in entry.top]).exp()) == pytest.approx(1, abs=1e-4)
        assert (await ask(engine, byte_ids("?"), **bytes_only)).logprobs is None


async def test_logprobs_of_a_step_go_to_the_requests_that_asked() -> None:
    """Rows of one step want none, the drawn token's alone, two, and the whole vocabulary."""
    async with scripted_engine(ShapedModel(shape=rolling)) as engine:
        wants: tuple[int | None, ...] = (None, 0, 2, -1)
        prompts = [byte_ids(text) for text in ("a", "bb", "ccc", "dddd")]
        alone = [
            await ask(engine, prompt, temperature=0.0, max_tokens=20, logprobs=wanted)
            for prompt, wanted in zip(prompts, wants, strict=True)
        ]
        together: dict[int, Generation] = {}

        async def note(index: int) -> None:
            together[index] = await ask(engine, prompts[index], temperature=0.0, max_tokens=20, logprobs=wants[index])

        async with anyio.create_task_group() as group:
            for index in range(4):
                group.start_soon(note, index)
        for index in range(4):
            assert together[index].token_ids == alone[index].token_ids
            assert together[index].logprobs == alone[index].logprobs


async def test_unread_logprobs_hold_only_the_requests_own() -> None:
    """A reader that lags keeps its few values alive, not those of the neighbour that asked for the vocabulary."""
    async with scripted_engine(ShapedModel(shape=rolling), max_unread_tokens=30) as engine:
        lagging = engine.stream(
            Request(prompt_token_ids=[1], sampling=SamplingParams(logprobs=1, max_tokens=40, ignore_eos=True))
        )
        await ask(engine, [2], logprobs=-1, max_tokens=60)
        with anyio.fail_after(5):
            while not engine.stats()["text"].held:
                await anyio.sleep(0.001)
        kept = [piece.logprobs for piece in lagging._mailbox.pieces]  # type: ignore[union-attr]
        assert len(kept) == 30
        for values in kept:
            assert values is not None
            for part in (values.chosen, values.rank, values.top_ids, values.top):
                assert part.size == 1
                assert part.base is None  # no view of something larger
        await lagging.aclose()


async def test_the_end_mark_has_a_logprob_too() -> None:
    async with scripted_engine([Script(byte_ids("?"), [*byte_ids("ab"), EOS])]) as engine:
        result = await engine.generate(Request(prompt="?", sampling=SamplingParams(logprobs=1)))
        assert result.logprobs is not None
        assert [entry.token_id for entry in result.logprobs] == [*byte_ids("ab"), EOS]
        assert all(entry.rank == 1 and entry.logprob > -1e-3 for entry in result.logprobs)
