"""Engines around a scripted model."""

from collections.abc import Sequence
from typing import Unpack

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from omni_async import Engine, EngineOptions
from omni_async.loading.loaded import GenerationDefaults, Loaded, TextTokenizer
from omni_async.models.protocol import StageModel
from omni_async.options import OptionFields
from omni_async.stage import StageStats
from tests.support.checkpoints import byte_tokenizer
from tests.support.scripted import Script, ScriptedModel

EOS = 257
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def byte_ids(text: str | bytes) -> list[int]:
    """The ids of the byte tokenizer: id = position of the byte in the byte-level alphabet."""
    data = text.encode() if isinstance(text, str) else text
    return [BYTE_IDS[byte] for byte in data]


def _byte_ids() -> list[int]:
    tokenizer = byte_tokenizer()
    printable = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    chars = {b: chr(b) for b in printable}
    chars |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in chars)}
    return [tokenizer.token_to_id(chars[b]) for b in range(256)]


BYTE_IDS = _byte_ids()


def scripted_engine(
    scripts: Sequence[Script] | StageModel = (),
    *,
    tokenizer: Tokenizer | None = None,
    with_tokenizer: bool = True,
    **options: Unpack[OptionFields],
) -> Engine:
    """A small engine on the CPU with the byte tokenizer: over a scripted model, or any other."""
    model = ScriptedModel(scripts) if isinstance(scripts, Sequence) else scripts
    wrapped = None
    if with_tokenizer:
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer or byte_tokenizer(), bos_token="<s>", eos_token="</s>"
        )
        fast.chat_template = CHAT_TEMPLATE
        wrapped = TextTokenizer(fast)

    def load(options: EngineOptions) -> Loaded:
        return Loaded(
            model=model,
            tokenizer=wrapped,
            defaults=GenerationDefaults(eos_token_ids=(EOS,)),
            name="scripted",
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    settings: OptionFields = {"device": "cpu", "max_slots": 8, "num_blocks": 256, "max_step_tokens": 64, **options}
    return Engine(load, EngineOptions(**settings))


def is_idle(stats: StageStats) -> bool:
    """Every slot, block and table is back to its start value."""
    return (
        stats.running == stats.waiting == stats.held == stats.requests == stats.slots_used == 0
        and stats.blocks_free == stats.blocks_total
    )


async def becomes_idle(engine: Engine, seconds: float = 5) -> None:
    """Wait until nothing is left of any request; fails after `seconds`."""
    import anyio

    with anyio.fail_after(seconds):
        while not all(is_idle(stats) for stats in engine.stats().values()):
            await anyio.sleep(0.001)
