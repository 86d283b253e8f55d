"""The tokenizer that a GGUF file describes."""

from collections.abc import Mapping
from dataclasses import dataclass

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from omni_async.errors import CheckpointError, UnsupportedModel
from omni_async.loading.gguf.file import GGUFFile
from omni_async.loading.tokenizer import TextTokenizer

KEY = "tokenizer.ggml."
BYTE_LEVEL_BPE = "gpt2"
NO_TOKENIZER = ("none", "no_vocab")

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""https://github.com/openai/gpt-2/blob/master/src/encoder.py."""


def _words(digits: str) -> str:
    """The words of GPT-4 and its followers, with their own rule for runs of digits."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a family of byte-level vocabularies cuts text into words before it merges bytes."""

    patterns: tuple[str, ...]
    """One after another, each cutting its matches out of the pieces that the last one left."""
    composed: bool = False
    """The text is put into Unicode's composed form (NFC) first."""
    whole_words: bool = False
    """A word that is a token is taken whole, whatever the merges would make of it."""
    adds_bos: bool = False
    """If the file does not say."""


_GPT2 = Splitting((GPT2_WORDS,))
_LLAMA3 = Splitting((_words(r"\p{N}{1,3}"),), whole_words=True, adds_bos=True)
_QWEN2 = Splitting((_words(r"\p{N}"),), composed=True)

SPLITTINGS: Mapping[str, Splitting] = {
    "default": Splitting((r"[\p{P}$+<=>^~|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "smollm": Splitting((r"\p{N}", GPT2_WORDS)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
"""By `tokenizer.ggml.pre`; https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp."""


def make_tokenizer(file: GGUFFile) -> TextTokenizer | None:
    """The file's tokenizer; `None` if it has none.

    Raises:
        CheckpointError: metadata is missing or contradicts itself.
        UnsupportedModel: the kind of tokenizer is not built in.
    """
    kind = file.get(KEY + "model", str)
    if kind is None or kind in NO_TOKENIZER:
        return None
    if kind != BYTE_LEVEL_BPE:
        raise UnsupportedModel(f"{file.path}: {KEY}model={kind!r} is not built in, only {BYTE_LEVEL_BPE!r}")
    pre = file.get(KEY + "pre", str) or "default"
    splitting = SPLITTINGS.get(pre)
    if splitting is None:
        raise UnsupportedModel(f"{file.path}: {KEY}pre={pre!r} is not one of {', '.join(SPLITTINGS)}")
    tokens = _strings(file, KEY + "tokens")
    if not tokens:
        raise CheckpointError(f"{file.path}: metadata {KEY}tokens is missing")
    marks = {name: _mark(file, name, tokens) for name in ("bos", "eos", "padding")}
    tokenizer = _byte_level_bpe(file, tokens, splitting)
    _add_marks(file, tokenizer, splitting, marks)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token=marks["bos"], eos_token=marks["eos"], pad_token=marks["padding"]
    )
    fast.chat_template = file.get("tokenizer.chat_template", str)
    return TextTokenizer(fast)


def _byte_level_bpe(file: GGUFFile, tokens: list[str], splitting: Splitting) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [_merge(file, text, vocabulary) for text in _strings(file, KEY + "merges")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=splitting.whole_words))
    if splitting.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = file.get(KEY + "token_type", list) or []
    if kinds and len(kinds) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(tokens)} tokens, but {len(kinds)} token types")
    added = [
        AddedToken(token, special=kind != TokenType.USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _add_marks(file: GGUFFile, tokenizer: Tokenizer, splitting: Splitting, marks: Mapping[str, str | None]) -> None:
    """Let the tokenizer put BOS before a text, and EOS after it, if the file says so."""
    add_bos = file.get(KEY + "add_bos_token", bool)
    before = marks["bos"] if (splitting.adds_bos if add_bos is None else add_bos) else None
    after = marks["eos"] if file.get(KEY + "add_eos_token", bool) else None
    used = [mark for mark in (before, after) if mark is not None]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*([before] if before else []), "$A", *([after] if after else [])],
        special_tokens=[(mark, tokenizer.token_to_id(mark)) for mark in dict.fromkeys(used)],
    )


def _mark(file: GGUFFile, name: str, tokens: list[str]) -> str | None:
    token = file.get(f"{KEY}{name}_token_id", int)
    if token is None:
        return None
    if not 0 <= token < len(tokens):
        raise CheckpointError(f"{file.path}: {KEY}{name}_token_id is {token}; the vocabulary has {len(tokens)} tokens")
    return tokens[token]


def _merge(file: GGUFFile, text: str, vocabulary: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
        raise CheckpointError(f"{file.path}: merge {text!r} is not of two tokens to a third")
    return left, right


def _strings(file: GGUFFile, key: str) -> list[str]:
    values = file.get(key, list) or []
    strings = [value for value in values if isinstance(value, str)]
    if len(strings) != len(values):
        raise CheckpointError(f"{file.path}: metadata {key} holds values that are not strings")
    return strings
