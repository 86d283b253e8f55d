import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from omni_async.text import Vocabulary
from tests.support import tokenizers as kinds
from tests.support.engines import BYTE_IDS, byte_ids, byte_tokenizer

PEPPER = "\U0001f336"


def rich_byte_tokenizer() -> Tokenizer:
    """Bytes, marks, and added tokens inside and outside of the byte alphabet."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<|日本|>", special=True, normalized=False)])
    tokenizer.add_tokens(["two words", "<tool>", "ÿÿ", "日"])
    return tokenizer


BYTE_LEVEL = rich_byte_tokenizer()
BYTE_VOCABULARY = Vocabulary(BYTE_LEVEL)


def pieces(vocabulary: Vocabulary, ids: Sequence[int], skip: bool = True) -> list[str]:
    detokenizer = vocabulary.detokenizer(skip)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


# -- byte-level ----------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=40), st.booleans())
def test_byte_level_equals_one_decode_of_any_ids(ids: list[int], skip: bool) -> None:
    assert "".join(pieces(BYTE_VOCABULARY, ids, skip)) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=4),
            st.text(max_size=2).map(lambda text: text.encode("utf-8", "surrogatepass")),
            st.sampled_from(
                [b"\xe0\x80", b"\xf0\x9f", b"\xf4\x90", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf8\x88", b"\xe2\x82"]
            ),
        ),
        max_size=8,
    )
)
def test_byte_level_equals_one_decode_of_near_text(parts: list[bytes]) -> None:
    """Overlong forms, surrogates, cut characters: as many replacement characters as the one-shot decoder makes."""
    ids = byte_ids(b"".join(parts))
    assert "".join(pieces(BYTE_VOCABULARY, ids)) == BYTE_LEVEL.decode(ids)


def test_characters_in_pieces_come_when_complete() -> None:
    text = f"a{PEPPER}é你b"
    found = pieces(BYTE_VOCABULARY, byte_ids(text))
    assert found == ["a", "", "", "", PEPPER, "", "é", "", "", "你", "b", ""]
    assert pieces(BYTE_VOCABULARY, byte_ids(text.encode()[:3])) == ["a", "", "", "\ufffd"]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_steps_of_several_tokens_hold_whole_characters(step: int) -> None:
    text = f"a{PEPPER}é你b"
    ids = byte_ids(text)
    detokenizer = BYTE_VOCABULARY.detokenizer(True)
    deltas = ["".join(detokenizer.push(token) for token in ids[at : at + step]) for at in range(0, len(ids), step)]
    assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) == text == BYTE_LEVEL.decode(ids)
    assert detokenizer.flush() == ""


def test_a_prompt_that_ends_inside_a_character_shows_nothing_of_itself() -> None:
    """The answer's first two bytes are the last two of a character that the prompt began."""
    answer = byte_ids(PEPPER.encode()[2:] + b" ok")
    assert "".join(pieces(BYTE_VOCABULARY, answer)) == BYTE_LEVEL.decode(answer) == "\ufffd\ufffd ok"


def test_tokens_that_span_characters() -> None:
    """One token closes a character and opens the next."""
    from tokenizers import decoders, models

    cut = ["ä½łå", "¥½ä¸ĸçķ", "Į!"]  # noqa: RUF001
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(cut)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert pieces(Vocabulary(tokenizer), [0, 1, 2]) == ["你", "好世", "界!", ""]


def test_answers_do_not_share_state() -> None:
    first, second = BYTE_VOCABULARY.detokenizer(True), BYTE_VOCABULARY.detokenizer(True)
    head, tail = byte_ids("é")
    assert (first.push(head), second.push(BYTE_IDS[ord("x")]), first.push(tail), second.flush()) == ("", "x", "é", "")


def test_the_usual_token_takes_microseconds() -> None:
    detokenizer = BYTE_VOCABULARY.detokenizer(True)
    ids = byte_ids("the quick brown fox " * 500)
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        for token in ids:
            detokenizer.push(token)
        best = min(best, (time.perf_counter() - start) / len(ids))
    assert best < 5e-5  # about one on a quiet machine; decoding all tokens again takes milliseconds


# -- all other decoders ----------------------------------------------------------------------------------------------

TOKENIZERS = {make.__name__: make() for make in [*kinds.LOCAL, kinds.rewriting]}
VOCABULARIES = {name: Vocabulary(tokenizer) for name, tokenizer in TOKENIZERS.items()}


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_equals_one_decode_of_any_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=25))
    skip = data.draw(st.booleans())
    assert "".join(pieces(VOCABULARIES[kind], ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.text(min_size=1, max_size=2), st.sampled_from([b"\xc3", b"\x80", b"A", b"\xff"])), max_size=6)
)
def test_runs_of_bytes_equal_one_decode(parts: list[str | bytes]) -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids: list[int] = []
    for part in parts:
        for byte in part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass"):
            token = tokenizer.token_to_id(f"<0x{byte:02X}>")
            ids.append(token if token is not None else tokenizer.token_to_id("▁the"))
    assert "".join(pieces(VOCABULARIES["sentencepiece"], ids)) == tokenizer.decode(ids)


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    return [tokenizer.token_to_id(token) for token in tokens]


def found(make: Callable[[], Tokenizer], *tokens: str) -> list[str]:
    tokenizer = make()
    return pieces(Vocabulary(tokenizer), ids_of(tokenizer, *tokens))


def test_text_comes_as_soon_as_it_is_certain() -> None:
    assert found(kinds.sentencepiece, "▁the", "t", "▁a", "<s>", "b") == ["the", "t", " a", "", "b", ""]
    assert found(kinds.metaspace, "▁the", "▁", "▁a", "b") == ["the", " ", " a", "b", ""]
    assert found(kinds.wordpiece, "the", "##a", ".", "b", "n't") == ["the", "a", ".", " b", "n't", ""]
    assert found(kinds.suffixed, "a", "b</w>", "the</w>", "a") == ["a", "b", " the", " a", ""]
    assert found(kinds.spaced, "a", "b") == ["a", " b", ""]
    assert found(kinds.chained_byte_level, "a", "ãģ", "Ĥ", "X") == ["a", "", "あ", "", "\ufffd"]


def test_what_later_tokens_may_change_is_held_back() -> None:
    # Bytes of one run are valid together or not at all.
    run = ["a", "<0xC3>", "<0xA9>", "<0x41>"]
    assert found(kinds.sentencepiece, *run, "b") == ["a", "", "", "", "éAb", ""]
    assert found(kinds.sentencepiece, *run, "<0xFF>", "b") == ["a", "", "", "", "", "\ufffd" * 4 + "b", ""]
    assert found(kinds.sentencepiece, *run) == ["a", "", "", "", "éA"]
    # Spaces at the start are stripped, so the first ones are not shown.
    assert found(kinds.late_spaces, "▁", "▁▁", "a", "▁▁", "b") == ["", " ", "a", "  ", "b", ""]


def test_a_decoder_that_rewrites_the_whole_text_waits_for_the_end() -> None:
    assert found(kinds.rewriting, "a", "b", "t") == ["", "", "", "ct"]


def test_windows_stay_small() -> None:
    """Each token is decoded with a few neighbours, however long the answer is."""
    tokenizer = kinds.sentencepiece()
    sizes: list[int] = []

    class Counting:
        def __init__(self) -> None:
            self.decoder = tokenizer.decoder

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            sizes.append(len(ids))
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

    vocabulary = Vocabulary(Counting())  # type: ignore[arg-type]
    pieces(vocabulary, ids_of(tokenizer, *["▁the", "ab", "<s>", "."] * 50))
    assert max(sizes) <= 3 + 1
