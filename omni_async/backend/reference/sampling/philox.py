"""Counter-based random numbers: Philox4x32-10, and the Gumbel noise that draws tokens.

One call yields four words, for four neighbouring token ids:

    counter = (token id // 4, output index, choice, stage << 16 | codebook)
    key     = (low half of the seed, high half of the seed)
    word    = output[token id % 4]
    uniform = ((word >> 9) + 0.5) * 2**-23
    gumbel  = -log(-log(uniform))

Every step up to the logarithms is exact: 23 bits and a half are as many as float32 holds, so the uniform number lies
strictly inside (0, 1). A number depends on nothing but these inputs: not on the batch, the device or earlier draws.

Source: Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3. SC 2011.
"""

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK = 0xFFFFFFFF
CHUNK = 2**14
"""Counters worked on at once, so that their words stay in the processor's cache."""


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox4x32-10 of 32-bit words held in int64 tensors, which broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The products wrap around in 64 bits, which keeps all of theirs; the upper half is cut off by the mask.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) ^ c1 ^ k0) & MASK, p1, ((p0 >> 32) ^ c3 ^ k1) & MASK, p0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1 & MASK, c2, c3 & MASK


def gumbel(seed: Tensor, output_index: Tensor, choice: Tensor, stage: int, codebook: int, vocab_size: int) -> Tensor:
    """Noise `[S, V] f32` for the whole vocabulary; the first three are `[S] int64`."""
    group = torch.arange(-(-vocab_size // 4), device=seed.device)
    noise = torch.empty((len(seed), vocab_size), dtype=torch.float32, device=seed.device)
    num_rows = max(1, CHUNK // len(group))
    for start in range(0, len(seed), num_rows):
        rows = slice(start, start + num_rows)
        words = _words(group, seed[rows, None], output_index[rows, None], choice[rows, None], stage, codebook)
        noise[rows] = to_gumbel(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size])
    return noise


def gumbel_at(
    token_ids: Tensor, seed: Tensor, output_index: Tensor, choice: Tensor, stage: int, codebook: int
) -> Tensor:
    """The same noise for given token ids only; all `int64`, of shapes that broadcast. Returns `f32`."""
    words = torch.stack(_words(token_ids >> 2, seed, output_index, choice, stage, codebook), dim=-1)
    return to_gumbel(words.gather(-1, (token_ids & 3).expand(words.shape[:-1])[..., None])[..., 0])


def to_gumbel(words: Tensor) -> Tensor:
    """Noise `f32` of 32-bit words."""
    uniform = (words >> 9).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _words(group: Tensor, seed: Tensor, output_index: Tensor, choice: Tensor, stage: int, codebook: int) -> Words:
    place = torch.full_like(output_index, stage << 16 | codebook)
    return philox((group, output_index, choice, place), (seed & MASK, (seed >> 32) & MASK))
