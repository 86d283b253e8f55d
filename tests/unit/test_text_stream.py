import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omni_async.text import TextStream, Vocabulary
from omni_async.text.stream import StopSearch
from tests.support.checkpoints import byte_tokenizer
from tests.support.engines import byte_ids


class Pieces:
    """A detokenizer whose tokens are indices of given pieces."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self.pieces = pieces
        self.rest = rest

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return self.rest


def run(stream: TextStream, count: int) -> list[str]:
    """What each push gives, and the end."""
    shown = [stream.push(i) for i in range(count)]
    return [*shown, stream.finish()]


LETTERS = ["x", "DEF", "G", "HI", "J", "K"]


def test_nothing_of_a_stop_string_is_shown() -> None:
    stream = TextStream(Pieces(LETTERS), ("DEFGHIJ",))
    assert run(stream, 6) == ["x", "", "", "", "", "", ""]
    assert stream.matched == "DEFGHIJ"


def test_the_stop_string_itself_is_shown_if_asked_for() -> None:
    stream = TextStream(Pieces([*LETTERS[:-1], "JK"]), ("DEFGHIJ",), include_stop=True)
    assert run(stream, 6)[:5] == ["x", "", "", "", "DEFGHIJ"]
    assert run(TextStream(Pieces(["a", "bSTOPc"]), ("STOP",), True), 2) == ["a", "bSTOP", ""]


def test_a_stop_string_that_does_not_come_is_delivered() -> None:
    stream = TextStream(Pieces(["x", "DEF", "G", "H", "X", "y"]), ("DEFGHIJ",))
    assert run(stream, 6) == ["x", "", "", "", "DEFGHX", "y", ""]
    assert stream.matched is None
    stream = TextStream(Pieces(["x", "DEF"]), ("DEFGHIJ",))
    assert run(stream, 2) == ["x", "", "DEF"]


def test_without_stop_strings_nothing_is_held() -> None:
    assert run(TextStream(Pieces(["a", "", "b"], rest="\ufffd")), 3) == ["a", "", "b", "\ufffd"]


def test_the_stop_that_ends_first_wins_then_the_one_that_begins_first() -> None:
    for stops in (("bcd", "c"), ("c", "bcd")):
        stream = TextStream(Pieces(["abcd"]), stops)
        assert run(stream, 1) == ["ab", ""]
        assert stream.matched == "c"
    for stops in (("d", "bcd", "cd"), ("cd", "d", "bcd")):
        stream = TextStream(Pieces(["ab", "cde"]), stops)
        assert run(stream, 2) == ["a", "", ""]
        assert stream.matched == "bcd"


def test_a_stop_inside_a_failed_longer_one_is_found() -> None:
    stream = TextStream(Pieces(["ab", "ab", "ab", "c"]), ("ababx", "bc"))
    assert "".join(run(stream, 4)) == "ababa"
    assert stream.matched == "bc"


def test_characters_cut_by_tokens_and_stops() -> None:
    vocabulary = Vocabulary(byte_tokenizer())
    stream = TextStream(vocabulary.detokenizer(True), ("é\U0001f336",))
    shown = [stream.push(token) for token in byte_ids("aé\U0001f336b")]
    assert "".join(shown) == "a"
    assert stream.matched == "é\U0001f336"


@pytest.mark.parametrize("min_tokens", range(6))
def test_stops_are_heeded_after_min_tokens(min_tokens: int) -> None:
    """Stops end in tokens 2 and 4 (counted from 1)."""
    stream = TextStream(Pieces(["a", "S", "b", "S", "c"]), ("S",), min_tokens=min_tokens)
    shown = "".join(run(stream, 5))
    assert shown == ("a" if min_tokens < 2 else "aSb" if min_tokens < 4 else "aSbSc")
    assert stream.matched == (None if min_tokens >= 4 else "S")


def test_a_stop_begun_before_min_tokens_counts_if_it_ends_after() -> None:
    stream = TextStream(Pieces(["xST", "OP", "y"]), ("STOP",), min_tokens=1)
    assert run(stream, 3) == ["x", "", "", ""]
    assert stream.matched == "STOP"
    # One that ended too early is text, and may yet be the beginning of another.
    stream = TextStream(Pieces(["abab", "ab"]), ("abab",), min_tokens=1)
    assert run(stream, 2) == ["ab", "", ""]
    assert stream.matched == "abab"


def test_a_stop_in_the_incomplete_end_still_cuts() -> None:
    stream = TextStream(Pieces(["a", "S"], rest="\ufffdz"), ("S\ufffd",))
    assert run(stream, 2) == ["a", "", ""]
    assert stream.matched == "S\ufffd"
    stream = TextStream(Pieces(["a", "S"], rest="\ufffdz"), ("S\ufffd",), min_tokens=2)
    assert "".join(run(stream, 2)) == "aS\ufffdz"


# -- properties ------------------------------------------------------------------------------------------------------


def one_shot(pieces: list[str], stops: list[str], include: bool, min_tokens: int) -> tuple[str, str | None]:
    """Where the whole text is cut, by trying all ends in order."""
    text = "".join(pieces)
    early = len("".join(pieces[:min_tokens]))
    for end in range(early + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


few = st.text("ab", max_size=4)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(few, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    st.booleans(),
    st.integers(0, 4),
    few,
)
@example(["aab", "aaa", "b"], ["aabaaab", "aaaa"], False, 0, "")
def test_streaming_equals_one_shot(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int, rest: str
) -> None:
    stream = TextStream(Pieces(pieces, rest), tuple(stops), include, min_tokens)
    shown: list[str] = []
    for token in range(len(pieces)):
        shown.append(stream.push(token))
        if stream.matched is not None:
            break
    end = stream.finish()
    # The rest belongs to the last token.
    merged = [*pieces[:-1], pieces[-1] + rest] if pieces else []
    if not pieces:
        assert end == rest
        return
    wanted, matched = one_shot(merged, stops, include, min_tokens)
    assert ("".join(shown) + end, stream.matched) == (wanted, matched)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from("aé你\U0001f336 b"), max_size=10).map("".join),
    st.lists(st.sampled_from(["é", "你\U0001f336", "ab", " b", "b a", "\U0001f336\U0001f336"]), max_size=3),
    st.integers(1, 3),
)
def test_streaming_bytes_equals_one_shot(text: str, stops: list[str], step: int) -> None:
    vocabulary = Vocabulary(byte_tokenizer())
    stream = TextStream(vocabulary.detokenizer(True), tuple(stops))
    ids = byte_ids(text)
    deltas = ["".join(map(stream.push, ids[at : at + step])) for at in range(0, len(ids), step)]
    wanted, matched = one_shot([text], stops, False, 0)
    assert ("".join(deltas) + stream.finish(), stream.matched) == (wanted, matched)


@settings(max_examples=200, deadline=None)
@given(st.lists(few, min_size=1, max_size=12), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4))
def test_no_more_is_held_than_must_be(pieces: list[str], stops: list[str]) -> None:
    stream = TextStream(Pieces(pieces), tuple(stops))
    shown = ""
    for token in range(len(pieces)):
        shown += stream.push(token)
        if stream.matched is not None:
            return
        text = "".join(pieces[: token + 1])
        prefixes = [stop[:n] for stop in stops for n in range(len(stop))]
        held = max(len(prefix) for prefix in prefixes if text.endswith(prefix))
        assert shown == text[: len(text) - held]


def test_long_stops_and_many_of_them_cost_little() -> None:
    """Against a search that starts again at each character this would take minutes."""
    stops = tuple("a" * 4000 + chr(ord("b") + i) for i in range(20))
    stream = TextStream(Pieces(["aaaa"]), stops)
    start = time.perf_counter()
    for _ in range(2000):
        stream.push(0)
    assert time.perf_counter() - start < 5
    assert stream.matched is None


def test_borders() -> None:
    search = StopSearch("aabaaab")
    assert [search._border(n) for n in range(1, 8)] == [0, 1, 0, 1, 2, 2, 3]
