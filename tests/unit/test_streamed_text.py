"""Text as it leaves the engine: whole characters, no part of a stop string, nothing of the prompt."""

import anyio
import pytest
from tokenizers import Tokenizer, decoders, models

from omni_async import Request, SamplingParams, TextDelta
from omni_async.text.vocabulary import BYTE_OF
from tests.support.checkpoints import byte_tokenizer
from tests.support.engines import EOS, byte_ids, scripted_engine
from tests.support.scripted import Script

pytestmark = pytest.mark.anyio

PEPPER = "\U0001f336".encode()
MIXED = "a\U0001f336\u00e9\u4f60b"


async def streamed(script: Script, **sampling: object) -> tuple[list[TextDelta], str, object]:
    """The deltas of a stream, the text of `generate`, and why it stopped."""
    async with scripted_engine([script]) as engine:
        request = Request(prompt_token_ids=script.prompt, sampling=SamplingParams(**sampling))  # type: ignore[arg-type]
        deltas = [event async for event in engine.stream(request) if isinstance(event, TextDelta)]
        whole = await engine.generate(request)
        return deltas, whole.text, (whole.reason, whole.stop_reason)


async def test_a_prompt_that_ends_inside_a_character_does_not_leak() -> None:
    prompt = byte_ids(b"Hello world " + PEPPER[:2])
    says = [*byte_ids(PEPPER[2:]), *byte_ids(" ok"), EOS]
    deltas, whole, _ = await streamed(Script(prompt, says))
    joined = "".join(d.text for d in deltas)
    assert joined == whole == byte_tokenizer().decode(says)
    assert "Hello" not in joined
    assert joined.endswith(" ok")
    assert set(joined.removesuffix(" ok")) == {"\N{REPLACEMENT CHARACTER}"}


@pytest.mark.parametrize("most", [1, 2, 3, 1000])
async def test_characters_of_several_tokens_arrive_whole(most: int) -> None:
    """In deltas of at most so many tokens; where no character is complete, the delta's text is empty."""
    ids = [*byte_ids(MIXED), EOS]
    async with scripted_engine([Script(byte_ids("?"), ids)], max_unread_tokens=most) as engine:
        request = Request(prompt="?")
        deltas = [event async for event in engine.stream(request) if isinstance(event, TextDelta)]
        assert "".join(d.text for d in deltas) == (await engine.generate(request)).text == MIXED
        assert [token for d in deltas for token in d.token_ids] == ids
        assert all("\N{REPLACEMENT CHARACTER}" not in d.text for d in deltas)
        assert all(1 <= len(d.token_ids) <= most for d in deltas)
        if most == 1:
            assert [d.text for d in deltas] == ["a", "", "", "", "\U0001f336", "", "\u00e9", "", "", "\u4f60", "b", ""]


async def test_tokens_that_close_one_character_and_open_the_next() -> None:
    text = "\u6211\u5462\u561b"
    data = text.encode()
    char_of = {byte: char for char, byte in BYTE_OF.items()}
    pieces = [data[:2], data[2:5], data[5:7], data[7:]]
    words = ["".join(char_of[byte] for byte in piece) for piece in (b"?", *pieces)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.decoder = decoders.ByteLevel()
    async with scripted_engine([Script([0], [1, 2, 3, 4])], tokenizer=tokenizer, max_unread_tokens=1) as engine:
        request = Request(prompt_token_ids=[0], sampling=SamplingParams(max_tokens=4))
        deltas = [event.text async for event in engine.stream(request) if isinstance(event, TextDelta)]
        assert deltas == ["", text[0], text[1], text[2]]
        assert "".join(deltas) == tokenizer.decode([1, 2, 3, 4]) == text


@pytest.mark.parametrize("included", [False, True])
async def test_no_part_of_a_stop_string_is_sent_before_it_completes(included: bool) -> None:
    script = Script(byte_ids("?"), [*byte_ids("xDEFGHIJK"), EOS])
    deltas, whole, why = await streamed(script, stop=["DEFGHIJ"], include_stop_str_in_output=included)
    expected = "xDEFGHIJ" if included else "x"
    assert "".join(d.text for d in deltas) == whole == expected
    assert why == ("stop", "DEFGHIJ")


async def test_what_only_began_like_a_stop_string_is_delivered() -> None:
    script = Script(byte_ids("?"), [*byte_ids("xDEFGHX"), EOS])
    deltas, whole, why = await streamed(script, stop=["DEFGHIJ"])
    assert "".join(d.text for d in deltas) == whole == "xDEFGHX"
    assert why == ("stop", None)
    cut = Script(byte_ids("?"), byte_ids("xDEFGHIJ"))
    deltas, whole, why = await streamed(cut, stop=["DEFGHIJ"], max_tokens=6)
    assert "".join(d.text for d in deltas) == whole == "xDEFGH"
    assert why == ("length", None)


async def test_stop_ids_end_marks_and_minimum_lengths() -> None:
    script = Script(byte_ids("?"), [*byte_ids("ab"), EOS, *byte_ids("c"), EOS])
    assert (await streamed(script))[1:] == ("ab", ("stop", None))
    assert (await streamed(script, ignore_eos=True, max_tokens=4))[1:] == ("abc", ("length", None))
    stop = byte_ids("b")[0]
    assert (await streamed(script, stop_token_ids=[stop]))[1:] == ("a", ("stop", stop))
    # A stop within the budget goes before the limit that the same token reaches.
    assert (await streamed(script, stop_token_ids=[stop], max_tokens=2))[2] == ("stop", stop)
    _, whole, why = await streamed(script, min_tokens=4, temperature=0.0)
    assert len(whole) == 4
    assert why == ("stop", None)


async def test_special_tokens_are_shown_on_demand() -> None:
    script = Script(byte_ids("?"), [*byte_ids("a"), 256, *byte_ids("b"), EOS])
    assert (await streamed(script))[1] == "ab"
    assert (await streamed(script, skip_special_tokens=False))[1] == "a<s>b"


async def test_logprob_bytes_join_to_the_text() -> None:
    script = Script(byte_ids("?"), byte_ids(MIXED))
    deltas, whole, _ = await streamed(script, logprobs=1, max_tokens=len(MIXED.encode()))
    entries = [entry for d in deltas for entry in d.logprobs or ()]
    assert b"".join(entry.bytes for entry in entries).decode() == whole == MIXED
    assert all(entry.rank == 1 and entry.top[0].token_id == entry.token_id for entry in entries)


async def test_an_empty_prompt_is_the_tokenizers_own_start() -> None:
    async with scripted_engine([Script([256], [*byte_ids("ok"), EOS])], tokenizer=byte_tokenizer(bos=True)) as engine:
        result = await engine.generate(Request(prompt=""))
        assert (result.text, result.usage.prompt_tokens) == ("ok", 1)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # it takes seconds: one kind of loop is enough
async def test_a_prompt_of_megabytes_freezes_nobody() -> None:
    """It is refused in the end; meanwhile the caller's loop ticks and another stream runs."""
    endless = Script(byte_ids("go"), byte_ids("x"))
    async with scripted_engine([endless], max_unread_tokens=10_000) as engine:
        gaps: list[float] = []
        refused = anyio.Event()

        async def tick() -> None:
            last = anyio.current_time()
            while not refused.is_set():
                await anyio.sleep(0.01)
                gaps.append(anyio.current_time() - last)
                last = anyio.current_time()

        async def flood() -> None:
            with pytest.raises(ValueError, match="4096"):
                await engine.generate(Request(prompt="word " * 1_000_000))
            refused.set()

        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            group.start_soon(flood)
            received = 0
            while not refused.is_set():
                async with engine.stream(Request(prompt="go")) as events:
                    async for event in events:
                        received += isinstance(event, TextDelta)
                        if refused.is_set():
                            break
        assert received > 0
        assert max(gaps) < 1  # tokenising takes longer; `bench` has the figure of a quiet machine
