import io
import sys
from collections.abc import Iterator

import pytest

from omni_async.progress import track_bytes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("enabled", "stream"), [(True, io.StringIO()), (False, Terminal())])
def test_nothing_is_written(enabled: bool, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    items = ["ab", "c"]
    assert list(track_bytes(items, len, total=3, label="loading", enabled=enabled)) == items
    assert stream.getvalue() == ""


def test_no_stderr_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert list(track_bytes(["ab"], len, total=2, label="loading")) == ["ab"]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(track_bytes([1500, 500], int, total=2000, label="loading")) == [1500, 500]
    assert "loading: 100%" in terminal.getvalue()
    assert "2.00k/2.00k" in terminal.getvalue()


def test_items_are_taken_one_by_one() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for i in range(3):
            taken.append(i)
            yield i

    tracked = track_bytes(items(), int, total=3, label="loading")
    assert next(tracked) == 0
    assert taken == [0]
