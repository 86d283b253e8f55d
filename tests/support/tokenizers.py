"""Small tokenizers of each kind of decoder."""

from tokenizers import Tokenizer, decoders, models

PIECES = ["a", "b", "t", "h", "▁", "▁▁", "▁a", "▁the", "ab", "é", "日", "\ufffd", " ", ".", "▁.", "n't", " b", "x▁"]
BYTES = [f"<0x{byte:02X}>" for byte in (*range(0x20, 0x80, 7), 0x0A, 0x41, *range(0x80, 0x100))]


def _of_words(words: list[str], decoder: decoders.Decoder | None) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<tool>", "two words"])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Words with a mark for the space, and single bytes for what is no word."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _of_words(PIECES + BYTES, decoders.Sequence(steps))


def late_spaces() -> Tokenizer:
    """The same in another order, with more to strip."""
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 2, 0)]
    return _of_words(PIECES + BYTES, decoders.Sequence(steps))


def metaspace() -> Tokenizer:
    return _of_words(PIECES, decoders.Metaspace())


def wordpiece() -> Tokenizer:
    words = ["a", "b", "the", "##a", "##the", "##.", ".", ",", "n't", "do not", "'s", "é", "##é", "##", "日"]
    return _of_words(words, decoders.WordPiece("##", cleanup=True))


def suffixed() -> Tokenizer:
    return _of_words(["a", "b</w>", "the</w>", "the", "</w>", "日</w>", "a</w>b"], decoders.BPEDecoder("</w>"))


def ctc() -> Tokenizer:
    return _of_words(["<pad>", "|", "a", "b", "the", "'s", "."], decoders.CTC())


def spaced() -> Tokenizer:
    """No decoder: tokens joined by spaces."""
    return _of_words(["a", "b", "the", "日", "."], None)


def chained_byte_level() -> Tokenizer:
    """A byte-level decoder that is only one of two steps."""
    words = ["a", "b", "Ġ", "Ġthe", "ãģĤ", "ãģ", "Ĥ", "ã", "ð", "Ł", "Į", "ÿ", "X"]
    return _of_words(words, decoders.Sequence([decoders.Replace("X", "é"), decoders.ByteLevel()]))


def rewriting() -> Tokenizer:
    """Replaces in the text as a whole, so that no token's text is certain before the end."""
    steps = [decoders.Fuse(), decoders.Replace("ab", "c")]
    return _of_words(["a", "b", "ab", "t"], decoders.Sequence(steps))


LOCAL = [sentencepiece, late_spaces, metaspace, wordpiece, suffixed, ctc, spaced, chained_byte_level]
