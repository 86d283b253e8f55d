import pytest

from omni_async.text import Vocabulary
from tests.support import tokenizers as kinds
from tests.support.checkpoints import byte_tokenizer
from tests.support.engines import BYTE_IDS, byte_ids


def test_byte_level_tokens_are_their_bytes() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["two words", "日"])
    vocabulary = Vocabulary(tokenizer)
    assert [vocabulary.token_bytes(BYTE_IDS[byte]) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert vocabulary.token_bytes(256) == b"<s>"
    assert vocabulary.token_bytes(tokenizer.token_to_id("two words")) == b"two words"
    assert vocabulary.token_bytes(tokenizer.token_to_id("日")) == "日".encode()
    assert vocabulary.token_bytes(vocabulary.size) == vocabulary.token_bytes(10**6) == b""
    assert vocabulary.size == 260
    text = "aé你"
    assert b"".join(vocabulary.token_bytes(token) for token in byte_ids(text)) == text.encode()


@pytest.mark.parametrize(
    ("kind", "token", "stands_for"),
    [
        ("sentencepiece", "▁the", b" the"),
        ("sentencepiece", "ab", b"ab"),
        ("sentencepiece", "▁▁", b"  "),
        ("sentencepiece", "<0xE9>", b"\xe9"),
        ("sentencepiece", "日", "日".encode()),
        ("sentencepiece", "</s>", b"</s>"),
        ("metaspace", "▁the", b" the"),
        ("wordpiece", "##the", b"the"),
        ("wordpiece", "the", b" the"),
        ("spaced", "the", b" the"),
        ("chained_byte_level", "ãģ", b"\xe3\x81"),
        ("chained_byte_level", "Ġthe", b" the"),
    ],
)
def test_other_tokens_are_the_text_that_they_add(kind: str, token: str, stands_for: bytes) -> None:
    tokenizer = {make.__name__: make for make in kinds.LOCAL}[kind]()
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.token_bytes(tokenizer.token_to_id(token)) == stands_for
    assert vocabulary.token_bytes(9999) == b""


def test_marks_are_special_and_other_added_tokens_are_not() -> None:
    tokenizer = kinds.sentencepiece()
    vocabulary = Vocabulary(tokenizer)
    special = [token for token in range(vocabulary.size + 2) if vocabulary.is_special(token)]
    assert special == [tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")]
