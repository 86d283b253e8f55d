import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from omni_async.errors import CheckpointError, RequestError
from omni_async.loading.tokenizer import TextTokenizer, read_tokenizer
from tests.support.checkpoints import BOS, EOS, byte_tokenizer, fast_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(fast_tokenizer())


def text_of(ids: list[int]) -> str:
    text: str = byte_tokenizer().decode(ids, skip_special_tokens=False)
    return text


class TestEncode:
    @given(text=st.text())
    def test_round_trip(self, tokenizer: TextTokenizer, text: str) -> None:
        assert text_of(tokenizer.encode(text)) == text

    def test_marks_of_the_tokenizer_are_added(self) -> None:
        fast = fast_tokenizer()
        fast.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
        tokenizer = TextTokenizer(fast)
        assert tokenizer.encode("a")[0] == BOS
        assert tokenizer.encode("") == [BOS]
        # A chat template writes its own.
        assert BOS not in tokenizer.encode_chat([{"role": "user", "content": "a"}])

    def test_a_stored_limit_does_not_cut_prompts(self, tmp_path: Path) -> None:
        fast_tokenizer().save_pretrained(tmp_path)
        stored = json.loads((tmp_path / "tokenizer.json").read_text())
        stored["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
        stored["padding"] = {
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        }
        (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
        tokenizer = read_tokenizer(tmp_path)
        assert tokenizer is not None
        assert text_of(tokenizer.encode("ab")) == "ab"
        assert text_of(tokenizer.encode("a longer text")) == "a longer text"

    def test_half_a_surrogate_pair(self, tokenizer: TextTokenizer) -> None:
        with pytest.raises(RequestError, match="not valid Unicode"):
            tokenizer.encode("a\ud800")

    def test_other_threads_run_while_a_long_text_is_encoded(self, tokenizer: TextTokenizer) -> None:
        """If the interpreter lock were held, this thread would stand still nearly all of the time."""
        done = threading.Event()
        lengths: list[int] = []

        def encode() -> None:
            lengths.append(len(tokenizer.encode("ä " * 400_000)))
            done.set()

        thread = threading.Thread(target=encode)
        thread.start()
        begin = last = time.perf_counter()
        longest_pause = 0.0
        while not done.is_set():
            now = time.perf_counter()
            longest_pause, last = max(longest_pause, now - last), now
        thread.join()
        assert lengths == [1_200_000]
        assert longest_pause < (last - begin) / 2


class TestChat:
    def test_turns_and_the_opening_of_the_answer(self, tokenizer: TextTokenizer) -> None:
        ids = tokenizer.encode_chat([{"role": "user", "content": "Hä?"}, {"role": "assistant", "content": "x"}])
        assert text_of(ids) == "user: Hä?\nassistant: x\nassistant:"

    def test_text_parts(self, tokenizer: TextTokenizer) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert text_of(tokenizer.encode_chat([{"role": "user", "content": parts}])) == "user: a\nb\nassistant:"

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (None, "None"),
            (7, "7"),
            (b"x", "b'x'"),
            ([{"type": "image", "url": "x"}], "image"),
            (["x"], "'x'"),
            ([{"type": "text"}], "type"),
        ],
    )
    def test_other_contents(self, tokenizer: TextTokenizer, content: object, words: str) -> None:
        with pytest.raises(RequestError, match=rf"messages\[1\].*{words}"):
            tokenizer.encode_chat([{"role": "user", "content": "x"}, {"role": "user", "content": content}])

    def test_no_content(self, tokenizer: TextTokenizer) -> None:
        with pytest.raises(RequestError, match=r"messages\[0\].*content"):
            tokenizer.encode_chat([{"role": "user"}])

    def test_the_template_refuses(self, tokenizer: TextTokenizer) -> None:
        with pytest.raises(RequestError, match="no tools here"):
            tokenizer.encode_chat([{"role": "tool", "content": "x"}])

    @pytest.mark.parametrize("template", ["{{ messages[0]['name'] + 1 }}", "{{ 1 / 0 }}", "{% if %}", "{{ x.y.z }}"])
    def test_the_template_fails(self, template: str) -> None:
        fast = fast_tokenizer()
        fast.chat_template = template
        with pytest.raises(RequestError, match="chat template"):
            TextTokenizer(fast).encode_chat([{"role": "user", "content": "x"}])

    def test_no_template(self) -> None:
        fast = fast_tokenizer()
        fast.chat_template = None
        with pytest.raises(RequestError, match="no chat template"):
            TextTokenizer(fast).encode_chat([{"role": "user", "content": "x"}])

    def test_the_template_cannot_reach_python(self) -> None:
        fast = fast_tokenizer()
        fast.chat_template = "{{ messages.__class__.__base__.__subclasses__() }}"
        with pytest.raises(RequestError, match="chat template"):
            TextTokenizer(fast).encode_chat([{"role": "user", "content": "x"}])


class TestFolder:
    def test_read(self, tmp_path: Path) -> None:
        fast_tokenizer().save_pretrained(tmp_path)
        tokenizer = read_tokenizer(tmp_path)
        assert tokenizer is not None
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)
        assert text_of(tokenizer.encode("hallo</s>")) == "hallo</s>"
        assert tokenizer.encode("</s>") == [EOS]

    def test_no_files(self, tmp_path: Path) -> None:
        assert read_tokenizer(tmp_path) is None

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": 3}'])
    def test_corrupt(self, tmp_path: Path, text: str) -> None:
        fast_tokenizer().save_pretrained(tmp_path)
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match="tokenizer"):
            read_tokenizer(tmp_path)

    def test_marks_that_the_tokenizer_does_not_have(self) -> None:
        tokenizer = TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()))
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
