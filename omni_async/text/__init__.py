"""From token ids to text: vocabularies, incremental detokenizers, stop strings. No torch."""

from omni_async.text.detokenizer import Detokenizer
from omni_async.text.stream import TextStream
from omni_async.text.vocabulary import Vocabulary

__all__ = ["Detokenizer", "TextStream", "Vocabulary"]
