"""Text and chat turns to token ids."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from omni_async.errors import CheckpointError, PromptTooLong, RequestError, UnsupportedModel
from omni_async.text import Vocabulary
from omni_async.types import Message

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""A folder that holds none of these has no tokenizer."""

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
"""What an expression of a chat template raises on messages that it was not written for."""


class TextTokenizer:
    """A checkpoint's tokenizer and chat template. Its methods may run on any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # A tokenizer file may carry the settings of its training, which would cut prompts without a word.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocabulary = Vocabulary(self._backend)
        """What each token id stands for."""

    @property
    def bos_token_id(self) -> int | None:
        """The mark at the start of a text."""
        token: int | None = self._tokenizer.bos_token_id
        return token

    @property
    def eos_token_id(self) -> int | None:
        """The mark at the end of a text."""
        token: int | None = self._tokenizer.eos_token_id
        return token

    def encode(self, text: str, max_model_len: int | None = None) -> list[int]:
        """The token ids of a text, with the marks (such as BOS) that the tokenizer adds.

        Raises:
            RequestError: the text is not valid Unicode.
            PromptTooLong: there are `max_model_len` tokens or more.
        """
        return self._encode(text, max_model_len, marks=True)

    def encode_chat(self, messages: Sequence[Message], max_model_len: int | None = None) -> list[int]:
        """The token ids of chat turns and of the opening of the next answer, as the chat template writes them.

        A content that is a list of text parts is their texts, one a line.

        Raises:
            RequestError: there is no chat template, or it does not accept the messages.
            PromptTooLong: there are `max_model_len` tokens or more.
        """
        if self._tokenizer.chat_template is None:
            raise RequestError("this model has no chat template: give prompt or prompt_token_ids instead of messages")
        turns = [_as_text(i, message) for i, message in enumerate(messages)]
        try:
            text = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except TEMPLATE_ERRORS as error:
            raise RequestError(f"the chat template does not accept the messages: {error}") from error
        assert isinstance(text, str)
        # The template has written the marks.
        return self._encode(text, max_model_len, marks=False)

    def _encode(self, text: str, max_model_len: int | None, *, marks: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode: {error}") from error
        # The one form of encoding that runs without the interpreter lock.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=marks)
        if max_model_len is not None and len(encoding) >= max_model_len:
            # Before the ids of what may be megabytes become Python objects: that holds the interpreter lock.
            raise PromptTooLong(len(encoding), max_model_len)
        ids: list[int] = encoding.ids
        return ids


def _as_text(i: int, message: Message) -> dict[str, Any]:
    """A message whose content is a string; a template would print anything else as Python does."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return dict(message)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"messages[{i}]: content must be a string or a list of text parts, got {content!r}")
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(f"messages[{i}]: content holds {part!r}, which is not a text part")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def read_tokenizer(folder: Path) -> TextTokenizer | None:
    """The tokenizer of a Hugging Face folder; `None` if it holds no tokenizer files.

    Raises:
        CheckpointError: the files cannot be read.
        UnsupportedModel: the tokenizer has no form for the `tokenizers` library.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, LookupError, ImportError) as error:
        raise CheckpointError(f"{folder}: the tokenizer cannot be read: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UnsupportedModel(f"{folder}: {type(tokenizer).__name__} is not a tokenizer of the tokenizers library")
    return TextTokenizer(tokenizer)
