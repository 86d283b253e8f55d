"""What a request may hold: every limit, from both sides."""

import dataclasses

import pytest

from omni_async import OmniError, Request, RequestError, SamplingParams

ILLEGAL = [
    ({"max_tokens": 0}, "max_tokens must be between 1 .* got 0"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens must be an integer, got 1.5"),
    ({"top_p": 0}, r"top_p must be > 0 and <= 1, got 0"),
    ({"top_p": 1.0001}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"top_k": -2}, "top_k must be between -1 .* got -2"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens \(5\) is above max_tokens \(4\)"),
    ({"n": 0}, "n must be between 1"),
    ({"n": 100_000}, "n must be between 1 and 128, got 100000"),
    ({"logprobs": -2}, "logprobs must be between -1"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias holds -1"),
    ({"logit_bias": {"abc": 1.0}}, "logit_bias holds 'abc'"),
    ({"logit_bias": {3: float("nan")}}, r"logit_bias\[3\]"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "1025 entries; the limit is 1024"),
    ({"stop_token_ids": [3, -1]}, "stop_token_ids holds -1"),
    ({"stop_token_ids": ["abc"]}, "stop_token_ids holds 'abc'"),
    ({"allowed_token_ids": [-7]}, "allowed_token_ids holds -7"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"stop": ""}, "non-empty"),
    ({"stop": ["x", ""]}, "non-empty"),
    ({"stop": ["x"] * 10_000}, "10000 stop strings are above the limit of 64"),
    ({"stop": "x" * 4097}, "4097 characters is above the limit of 4096"),
]


@pytest.mark.parametrize(("fields", "words"), ILLEGAL, ids=[str(i) for i in range(len(ILLEGAL))])
def test_illegal_parameters_are_named(fields: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, OmniError)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 9_999_999},
        {"min_p": 0},
        {"min_p": 1},
        {"temperature": 0},
        {"temperature": 1e-12},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"min_tokens": 4, "max_tokens": 4},
        {"n": 128},
        {"logprobs": 0},
        {"logprobs": -1},
        {"logit_bias": {0: -100}},
        {"stop": ["x"] * 64},
    ],
    ids=str,
)
def test_the_limits_themselves_are_legal(fields: dict[str, object]) -> None:
    kept = dataclasses.asdict(SamplingParams(**fields))  # type: ignore[arg-type]
    for name, value in fields.items():
        assert kept[name] == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "got none"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "got prompt and prompt_token_ids"),
        ({"prompt": [""]}, "prompt must be a string, got list"),
        ({"prompt_token_ids": "abc"}, "got str"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hi"}, "got str"),
        ({"messages": [{"content": "hi"}]}, r"messages\[0\]"),
        ({"prompt": "a", "deadline_s": 0}, "deadline_s"),
        ({"prompt": "a", "priority": 0.5}, "priority"),
        ({"prompt": "a", "request_id": ""}, "request_id"),
        ({"prompt": "a", "outputs": []}, "outputs"),
        ({"prompt": "a", "outputs": "text"}, "outputs"),
        ({"prompt": "a", "sampling": {"text": 3}}, "text"),
    ],
    ids=str,
)
def test_illegal_requests_are_explained(fields: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Request(**fields)  # type: ignore[arg-type]
