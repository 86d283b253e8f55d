"""Log-probabilities on the host, and the form in which callers see them. No torch."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omni_async.types import TokenLogprob

TokenBytes = Callable[[int], bytes]
"""The UTF-8 bytes that a token id stands for."""


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """Log-probabilities of some positions, on the host; see `omni_async.backend.ops.Logprobs`."""

    chosen: NDArray[np.float32]
    rank: NDArray[np.int64]
    """`[P]` each: of the drawn (or given) token."""
    top_ids: NDArray[np.int64]
    top: NDArray[np.float32]
    """`[P, K]` each, most probable first."""

    def after(self, count: int) -> "HostLogprobs":
        """The values of all positions but the first `count`."""
        return HostLogprobs(self.chosen[count:], self.rank[count:], self.top_ids[count:], self.top[count:])

    def entry(self, at: int, num_top: int) -> "HostLogprobs":
        """A copy of one position's values, with the best `num_top` only: the rest need not stay in memory."""
        one = slice(at, at + 1)
        return HostLogprobs(
            self.chosen[one].copy(),
            self.rank[one].copy(),
            self.top_ids[one, :num_top].copy(),
            self.top[one, :num_top].copy(),
        )


def token_logprob(token_id: int, values: HostLogprobs, at: int, num_top: int, token_bytes: TokenBytes) -> TokenLogprob:
    """The public form of entry `at` of a step's log-probabilities."""
    ids: list[int] = values.top_ids[at, :num_top].tolist()
    best: list[float] = values.top[at, :num_top].tolist()
    ranks = [1] * len(ids)
    for i in range(1, len(ids)):
        ranks[i] = ranks[i - 1] if best[i] == best[i - 1] else i + 1
    top = tuple(TokenLogprob(i, value, rank, token_bytes(i)) for i, value, rank in zip(ids, best, ranks, strict=True))
    return TokenLogprob(token_id, float(values.chosen[at]), int(values.rank[at]), token_bytes(token_id), top)
