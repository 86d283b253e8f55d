"""A progress bar for people, and nothing for machines."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def track(items: Sequence[T], *, label: str, enabled: bool = True) -> Iterator[T]:
    """Pass `items` on; a bar on stderr counts them, if it is enabled and stderr is a terminal."""
    yield from tqdm(items, desc=label, disable=not (enabled and _is_terminal()))


def track_bytes(
    items: Iterable[T], size: Callable[[T], int], *, total: int, label: str, enabled: bool = True
) -> Iterator[T]:
    """Pass `items` on; a bar on stderr counts the bytes of those done, if it is enabled and stderr is a terminal."""
    visible = enabled and _is_terminal()
    with tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=not visible) as bar:
        for item in items:
            yield item
            bar.update(size(item))


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
