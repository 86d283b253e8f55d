"""Tokenizers that GGUF metadata describes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from omni_async.errors import CheckpointError, UnsupportedModel
from omni_async.loading.gguf.file import read_gguf
from omni_async.loading.gguf.tokenizer import SPLITTINGS, make_tokenizer
from omni_async.loading.tokenizer import TextTokenizer
from tests.support.checkpoints import BOS, EOS, byte_gguf_tokenizer, write_gguf


def read(path: Path, metadata: dict[str, object]) -> TextTokenizer | None:
    write_gguf(path / "m.gguf", "llama", {}, {"token_embd.weight": np.ones((2, 2), np.float32)}, tokenizer=metadata)
    return make_tokenizer(read_gguf(path / "m.gguf"))


def build(path: Path, **changes: Any) -> TextTokenizer:
    tokenizer = read(path, byte_gguf_tokenizer(**changes))
    assert tokenizer is not None
    return tokenizer


def greedy_merges(words: list[str]) -> tuple[list[str], list[str]]:
    """Tokens and merges that make each word one token, from its start to its end."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[str] = []
    for word in words:
        for i in range(1, len(word)):
            if word[: i + 1] not in tokens:
                tokens.append(word[: i + 1])
                merges.append(f"{word[:i]} {word[i]}")
    return tokens, merges


def words_of(path: Path, pre: str, text: str) -> list[str]:
    """How a text is cut into words, seen by a vocabulary that would merge all of it."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    [(whole, _)] = level.pre_tokenize_str(text)
    tokens, merges = greedy_merges([whole[i:] for i in range(len(whole))])
    marks = len(tokens)
    tokenizer = build(
        path,
        pre=pre,
        tokens=[*tokens, "<s>", "</s>"],
        token_type=[1] * marks + [3, 3],
        merges=merges,
        bos_token_id=marks,
        eos_token_id=marks + 1,
        add_bos_token=False,
    )
    ids = tokenizer.encode(text)
    return [b"".join(bytes([LETTERS[c]]) for c in tokens[i]).decode() for i in ids]


def _letters() -> dict[str, int]:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    [(spelled, _)] = level.pre_tokenize_str("".join(map(chr, range(128))))
    return dict(zip(spelled, range(128), strict=True))


LETTERS = _letters()


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["It", "'s", " 12345", " I", "'", "M", "  ", " x", "...!", "\n", "\n", "(", "y"]),
        (
            "smollm",
            ["It", "'s", " ", "1", "2", "3", "4", "5", " I", "'", "M", "  ", " x", "...!", "\n", "\n", "(", "y"],
        ),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " I", "'M", "  ", " x", "...!\n\n", "(y"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " I", "'M", "  ", " x", "...!\n\n", "(y"]),
    ],
)
def test_words(pre: str, expected: list[str], tmp_path: Path) -> None:
    text = "It's 12345 I'M   x...!\n\n(y"
    assert "".join(expected) == text
    assert words_of(tmp_path, pre, text) == expected


def test_words_of_files_that_do_not_say(tmp_path: Path) -> None:
    expected = ["a", ".", "b", " ", "123", "45", " c", "+"]
    assert words_of(tmp_path, "default", "a.b 12345 c+") == expected
    metadata = byte_gguf_tokenizer()
    del metadata["tokenizer.ggml.pre"]
    assert read(tmp_path, metadata) is not None


def test_the_composed_form(tmp_path: Path) -> None:
    """Qwen's vocabularies are of composed text; others keep text as it is."""
    composed, decomposed = "\u00e9", "e\u0301"
    assert build(tmp_path, pre="qwen2").encode(decomposed) == build(tmp_path).encode(composed)
    assert build(tmp_path).encode(decomposed) != build(tmp_path).encode(composed)


def test_whole_words_come_before_merges(tmp_path: Path) -> None:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "ab", "abc"]
    merges = ["b c"]
    changes = {"tokens": [*tokens, "bc"], "token_type": [1] * 256 + [3, 3, 1, 1, 1], "merges": merges}
    assert build(tmp_path, pre="llama-bpe", **changes).encode("abc")[1:] == [tokens.index("abc")]
    assert build(tmp_path, pre="gpt-2", **changes).encode("abc") == [tokens.index("a"), len(tokens)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"add_bos_token": True}, [BOS]),
        ({"pre": "llama-bpe"}, [BOS]),
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
        ({"add_bos_token": True, "add_eos_token": True}, [BOS, EOS]),
    ],
)
def test_marks_that_are_added(changes: dict[str, object], expected: list[int], tmp_path: Path) -> None:
    assert build(tmp_path, **changes).encode("") == expected


def test_kinds_of_tokens(tmp_path: Path) -> None:
    """Control and user-defined tokens are found in text; only control tokens are special; others are plain."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "<tool>", "<pad5>"]
    tokenizer = build(tmp_path, tokens=tokens, token_type=[1] * 256 + [3, 3, 4, 5])
    assert tokenizer.encode("<s><tool>") == [256, 258]
    assert 259 not in tokenizer.encode("<pad5>")
    assert [tokenizer.vocabulary.is_special(token) for token in (256, 258, 259)] == [True, False, False]


def test_chat_template(tmp_path: Path) -> None:
    assert build(tmp_path).encode_chat([{"role": "user", "content": "x"}]) == build(tmp_path).encode(
        "user: x\nassistant:"
    )


@pytest.mark.parametrize("kind", [None, "none", "no_vocab"])
def test_no_tokenizer(kind: str | None, tmp_path: Path) -> None:
    assert read(tmp_path, {"tokenizer.ggml.model": kind} if kind else {}) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"model": "llama"}, "'llama'"), ({"model": "bert"}, "'bert'"), ({"pre": "tekken"}, "'tekken'")],
)
def test_not_built_in(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=rf"m\.gguf.*{words}"):
        build(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": [1, 2]}, "not strings"),
        ({"merges": ["a"]}, "merge 'a'"),
        ({"merges": ["a xyz"]}, "merge 'a xyz'"),
        ({"token_type": [1, 1]}, "2 token types"),
        ({"eos_token_id": 258}, r"eos_token_id is 258; the vocabulary has 258"),
        ({"bos_token_id": "<s>"}, "bos_token_id is a str"),
    ],
)
def test_senseless_metadata(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"m\.gguf.*{words}"):
        build(tmp_path, **changes)


def test_no_tokens(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tokens is missing"):
        read(tmp_path, {"tokenizer.ggml.model": "gpt2"})


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_no_rule_loses_text(pre: str, tmp_path: Path) -> None:
    text = "It's 12345 \t\n\r\n x²½ äÖ 你好 🙂  {}[]|^ ''LL  "
    tokenizer = build(tmp_path, pre=pre, add_bos_token=False)
    data = b"".join(tokenizer.vocabulary.token_bytes(token) for token in tokenizer.encode(text))
    assert data.decode() == text
