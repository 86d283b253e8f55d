"""From a request to sequences: templates, tokens, limits; what takes long runs on threads of its own."""

import os
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass

import numpy as np

from omni_async.errors import PromptTooLong, RequestError
from omni_async.loading.loaded import GenerationDefaults, TextTokenizer
from omni_async.mailbox import Mailbox
from omni_async.sampling.params import check, count_logprobs, needs, resolve
from omni_async.scheduler.prefix import block_digests
from omni_async.scheduler.sequence import Sequence, StopRule
from omni_async.stage import ActiveRequest
from omni_async.text import TextStream
from omni_async.types import Request, SamplingParams

DEFAULT_SAMPLING = SamplingParams()

QUICK_TOKENS, QUICK_ANSWERS = 2048, 8
"""What is prepared in about 0.2 ms: sooner than another thread would have begun."""


@dataclass(frozen=True, slots=True)
class Intake:
    """What must be known of a stage to prepare requests for it."""

    stage: str
    """The stage's name, as `Request.sampling` and `Engine.stats` use it."""
    output: str
    """The name of what the stage produces, as `Request.outputs` uses it."""
    tokenizer: TextTokenizer | None
    defaults: GenerationDefaults
    vocab_size: int
    max_model_len: int
    block_size: int
    prefix_caching: bool

    def sampling(self, request: Request) -> SamplingParams:
        """The request's parameters for the stage, checked against the model. Cheap.

        Raises:
            RequestError: an unknown stage or output, an id outside the vocabulary, or text without a tokenizer.
        """
        unknown = request.outputs - {self.output}
        if unknown:
            raise RequestError(f"outputs {sorted(unknown)} are not offered; this engine offers {self.output!r}")
        params = request.sampling
        if isinstance(params, Mapping):
            strange = params.keys() - {self.stage}
            if strange:
                raise RequestError(f"sampling names the stages {sorted(strange)}; this engine has {self.stage!r}")
            params = params.get(self.stage)
        params = params or DEFAULT_SAMPLING
        check(params, self.vocab_size)
        if self.tokenizer is None:
            if request.prompt_token_ids is None:
                raise RequestError("this model has no tokenizer files: give prompt_token_ids")
            if params.stop:
                raise RequestError("this model has no tokenizer files: stop strings cannot be matched")
        return params

    @staticmethod
    def is_quick(request: Request, params: SamplingParams) -> bool:
        """Whether `prepare` may run on a caller's event loop, as it neither renders text nor takes long."""
        ids = request.prompt_token_ids
        return ids is not None and len(ids) <= QUICK_TOKENS and params.n <= QUICK_ANSWERS

    def prepare(self, request: Request, params: SamplingParams, mailbox: Mailbox) -> ActiveRequest:
        """Make the request's sequences.

        Raises:
            RequestError: the prompt is empty, too long, or cannot be turned into token ids.
        """
        prompt = self._prompt_ids(request)
        if not prompt:
            raise RequestError("the prompt is empty: it holds no tokens, and the tokenizer adds none at the start")
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        # Siblings share the prompt's blocks with the first of them, once it has computed them.
        digests = block_digests(prompt, self.block_size) if self.prefix_caching else []
        sequences: list[Sequence] = []
        for outlet in mailbox.outlets:
            row = resolve(
                params, self.defaults, self.vocab_size, self.defaults.eos_token_ids, len(prompt), seed, outlet.index
            )
            sequences.append(
                Sequence(
                    prompt,
                    rank=(request.priority, mailbox.arrival, outlet.index),
                    stop=self._stop_rule(params, len(prompt)),
                    outlet=outlet,
                    params=row,
                    needs=needs(row),
                    num_logprobs=row.num_logprobs,
                    # The prompt is the same for all answers: score it once.
                    num_prompt_logprobs=-1 if sequences else count_logprobs(params.prompt_logprobs, self.vocab_size),
                    block_hashes=digests,
                    text=self._text_stream(params),
                    leader=sequences[0] if sequences and self.prefix_caching else None,
                )
            )
        return ActiveRequest(mailbox, sequences, request.deadline_s)

    def _prompt_ids(self, request: Request) -> Ids[int]:
        if request.prompt_token_ids is not None:
            return self._checked("prompt_token_ids", request.prompt_token_ids)
        assert self.tokenizer is not None  # `sampling` has refused text without one
        if request.prompt is not None:
            return self._checked("the prompt's token", self.tokenizer.encode(request.prompt, self.max_model_len))
        assert request.messages is not None
        return self._checked("the prompt's token", self.tokenizer.encode_chat(request.messages, self.max_model_len))

    def _checked(self, name: str, ids: Ids[int]) -> Ids[int]:
        if len(ids) >= self.max_model_len:  # before looking at each of what may be millions
            raise PromptTooLong(len(ids), self.max_model_len)
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.vocab_size:  # all of them, quickly
            return array("i", ids)
        for position, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"{name}[{position}] is {token!r}; the model's vocabulary holds 0 to {self.vocab_size - 1}"
                )
        return array("i", ids)

    def _stop_rule(self, params: SamplingParams, prompt_len: int) -> StopRule:
        budget = self.max_model_len if params.max_tokens is None else prompt_len + params.max_tokens
        return StopRule(
            token_ids=frozenset(params.stop_token_ids),
            end_ids=frozenset() if params.ignore_eos else frozenset(self.defaults.eos_token_ids),
            max_length=min(budget, self.max_model_len),
        )

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        if self.tokenizer is None:
            return None
        detokenizer = self.tokenizer.vocabulary.detokenizer(params.skip_special_tokens)
        return TextStream(detokenizer, tuple(params.stop), params.include_stop_str_in_output, params.min_tokens)
