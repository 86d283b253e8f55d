"""Several answers to one request: what ends one of them, or all at once, leaves the engine and the others whole."""

import anyio
import pytest

from omni_async import Finished, NonFiniteLogits, Request, SamplingParams, StepFailed
from tests.support.engines import EOS, becomes_idle, byte_ids, scripted_engine
from tests.support.scripted import Script, ScriptedModel

pytestmark = pytest.mark.anyio

ENDLESS = Script(byte_ids("go"), byte_ids("x"))
HELLO = Script(byte_ids("Hi"), [*byte_ids("Hello you"), EOS])
BAD = Script(byte_ids("bad"), byte_ids("abcdef"), nan_at=3)


@pytest.mark.parametrize("pipelined", [True, False])
async def test_a_step_that_fails_several_answers_ends_their_request_once(pipelined: bool) -> None:
    broken = [True]

    def on_step(step: int) -> None:
        if step >= 4 and broken[0]:
            raise ValueError("planted")

    model = ScriptedModel([HELLO, ENDLESS], on_step=on_step)
    async with scripted_engine(model, pipelined=pipelined) as engine:
        with anyio.fail_after(5):
            with pytest.raises(StepFailed, match="planted"):
                await engine.generate(Request(prompt="go", sampling=SamplingParams(n=3)))
            broken[0] = False
            assert (await engine.generate(Request(prompt="Hi"))).text == "Hello you"
        await becomes_idle(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_logits_that_are_not_numbers_end_the_request_with_all_its_answers(prefix_caching: bool) -> None:
    async with scripted_engine([HELLO, BAD], prefix_caching=prefix_caching) as engine:
        with anyio.fail_after(5):
            with pytest.raises(NonFiniteLogits):
                await engine.generate(Request(prompt="bad", sampling=SamplingParams(n=3)))
            assert (await engine.generate(Request(prompt="Hi"))).text == "Hello you"
        await becomes_idle(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_every_answer_has_the_prompts_logprobs(prefix_caching: bool) -> None:
    """Whichever ends first, and although the prompt takes several steps."""
    prompt = list(range(1, 40))
    overtaken = 0
    async with scripted_engine(prefix_caching=prefix_caching, max_slots=4, max_step_tokens=32) as engine:
        for seed in range(5):
            params = SamplingParams(
                n=3, prompt_logprobs=1, max_tokens=12, temperature=100.0, seed=seed, stop_token_ids=range(64)
            )
            ends: list[Finished] = []
            with anyio.fail_after(5):
                async for event in engine.stream(Request(prompt_token_ids=prompt, sampling=params)):
                    if isinstance(event, Finished):
                        ends.append(event)
            assert len(ends) == 3
            overtaken += ends[0].index != 0
            for end in ends:
                assert end.prompt_logprobs is not None
                assert [entry and entry.token_id for entry in end.prompt_logprobs] == [None, *prompt[1:]]
    assert overtaken
