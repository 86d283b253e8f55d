"""A device in a few lines of Python, which runs plans and notices every read of another sequence's data.

Each cache entry holds a digest of all tokens up to its position. A row may only be computed if every earlier
entry that its block table names holds the digest of its own tokens; the token drawn is a function of that digest.
"""

import zlib
from array import array

from omni_async.scheduler.plan import StepOutput, StepPlan

VOCAB = 7


def digest(parent: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), parent)


def next_token(state: int) -> int:
    return zlib.crc32(b"draw", state) % VOCAB


def alone(prompt: list[int], count: int) -> list[int]:
    """What a sequence draws if nothing else is in the engine."""
    state = 0
    for token in prompt:
        state = digest(state, token)
    drawn: list[int] = []
    for _ in range(count):
        drawn.append(next_token(state))
        state = digest(state, drawn[-1])
    return drawn


class DeviceModel:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tokens: dict[int, array[int]] = {}
        self.tables: dict[int, dict[int, int]] = {}
        self.cache: dict[tuple[int, int], int] = {}

    def run(self, plan: StepPlan, error: BaseException | None = None) -> StepOutput:
        assert plan.rows
        assert plan.num_tokens == sum(row.length for row in plan.rows)
        for admission in plan.admissions:
            self.tokens[admission.slot] = array("i", admission.tokens)
            self.tables[admission.slot] = {}
        for slot, first, blocks in plan.new_blocks:
            for at, block in enumerate(blocks, first):
                self.tables[slot][at] = block
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "two rows of a step share a slot"
        written = [
            (self.tables[row.slot][p // self.block_size], p % self.block_size)
            for row in plan.rows
            for p in range(row.start, row.start + row.length)
        ]
        assert len(set(written)) == len(written), "two rows of a step write one cache entry"
        if error is not None:
            return StepOutput(plan, [], [], error=error)
        drawn: list[int] = []
        for row in plan.rows:
            tokens, table = self.tokens[row.slot], self.tables[row.slot]
            assert row.start + row.length <= len(tokens), "a row reads a token that was not drawn yet"
            state = 0
            for position in range(row.start + row.length):
                entry = (table[position // self.block_size], position % self.block_size)
                state = digest(state, tokens[position])
                if position < row.start:
                    assert self.cache.get(entry) == state, f"position {position} of {row} reads another's cache"
                else:
                    self.cache[entry] = state
            if row.samples:
                assert row.start + row.length == len(tokens)
                token = next_token(state)
                tokens.append(token)
                drawn.append(token)
        return StepOutput(plan, drawn, [True] * len(drawn))
