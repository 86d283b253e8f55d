"""A progress bar for people, and nothing for machines."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def track_bytes(
    items: Iterable[T], size: Callable[[T], int], *, total: int, label: str, enabled: bool = True
) -> Iterator[T]:
    """Pass `items` on; a bar on stderr counts the bytes of those done, if it is enabled and stderr is a terminal."""
    visible = enabled and sys.stderr is not None and sys.stderr.isatty()
    with tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=not visible) as bar:
        for item in items:
            yield item
            bar.update(size(item))
