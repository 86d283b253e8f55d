"""The examples run, with SmolLM2."""

import json
import re
import threading
from collections.abc import AsyncIterator, Sequence

import anyio
import pytest
from httpx import ASGITransport, AsyncClient
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.types import Message

from examples import embed_in_asyncio, starlette_app, twenty_requests_one_cancelled
from omni_async import Engine
from omni_async.cli import find_default_model
from tests.support.engines import EOS, becomes_idle, byte_ids, scripted_engine
from tests.support.scripted import Script, ScriptedModel

MODEL = str(find_default_model())
ENDLESS = Script(byte_ids("user: go\n"), byte_ids("x"))
HELLO = Script(byte_ids("user: Hi\n"), [*byte_ids("Hello"), EOS])


@pytest.fixture
def anyio_backend() -> str:
    """The examples are asyncio programs."""
    return "asyncio"


@pytest.mark.anyio
async def test_embed_in_asyncio(capsys: pytest.CaptureFixture[str]) -> None:
    await embed_in_asyncio.main(MODEL)
    assert "Paris" in capsys.readouterr().out


@pytest.mark.anyio
async def test_twenty_requests_one_cancelled(capsys: pytest.CaptureFixture[str]) -> None:
    await twenty_requests_one_cancelled.main(MODEL)
    *lines, stats = capsys.readouterr().out.splitlines()
    assert lines.pop(7) == " 7: cancelled"
    assert len(lines) == 19
    assert all(re.fullmatch(r""" ?\d+: ['"].{4,}['"]""", line) for line in lines)
    counts = re.fullmatch(r"running 0, waiting 0, steps (\d+), tokens (\d+)", stats)
    assert counts is not None
    assert 19 * 16 < int(counts[2]) < 20 * 16  # the cancelled one had begun and did not end
    assert int(counts[1]) < int(counts[2]) / 5  # they ran together


@pytest.fixture
def engine() -> Engine:
    return scripted_engine([ENDLESS, HELLO])


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[AsyncClient]:
    app = starlette_app.make_app(engine)
    async with app.router.lifespan_context(app), AsyncClient(transport=ASGITransport(app), base_url="http://a") as http:
        yield http


def events_of(body: str) -> Sequence[tuple[str, dict[str, object]]]:
    """Kind and data of each server-sent event."""
    found = []
    for block in body.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        found.append((fields.get("event", "message"), json.loads(fields["data"])))
    return found


@pytest.mark.anyio
async def test_the_web_application_streams_an_answer(client: AsyncClient) -> None:
    response = await client.post("/answer", json={"prompt": "Hi", "temperature": 0})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    *deltas, (kind, end) = events_of(response.text)
    assert "".join(str(data["text"]) for _, data in deltas) == "Hello"
    assert kind == "end"
    assert end["reason"] == "stop"
    assert end["usage"] == {"prompt_tokens": 9, "completion_tokens": 6, "cached_tokens": 0}
    assert (await client.get("/stats")).json()["text"]["tokens"] == 6


@pytest.mark.anyio
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"prompt": 3}',
        b'{"prompt": "Hi", "max_tokens": 0}',
        b'{"prompt": "Hi", "max_tokens": "9"}',
    ],
)
async def test_the_web_application_refuses_what_is_wrong(client: AsyncClient, body: bytes) -> None:
    response = await client.post("/answer", content=body)
    assert response.status_code == 400
    assert response.json()["error"]


@pytest.mark.anyio
async def test_an_error_after_the_start_is_an_event(client: AsyncClient) -> None:
    response = await client.post("/answer", json={"prompt": "x" * 5000})
    [(kind, data)] = events_of(response.text)
    assert kind == "error"
    assert "max_model_len is 4096" in str(data["error"])


@pytest.mark.anyio
@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_a_client_that_goes_away_ends_its_request(spec_version: str) -> None:
    """Servers tell of it in two ways: by a message, or (since 2.4 of the protocol) by an error when sending."""
    has_left = threading.Event()

    def on_step(step: int) -> None:
        if step == 50:
            assert has_left.wait(5)

    engine = scripted_engine(ScriptedModel([ENDLESS], on_step=on_step))
    app = starlette_app.make_app(engine)
    async with app.router.lifespan_context(app):
        await ask_and_leave(app, spec_version)
        has_left.set()
        await becomes_idle(engine)
        assert 3 <= engine.stats()["text"].tokens < 500


async def ask_and_leave(app: Starlette, spec_version: str) -> None:
    """Be a server whose client leaves after the third part of an answer of 500 tokens."""
    has_left = anyio.Event()
    parts = 0
    unread = [{"type": "http.request", "body": b'{"prompt": "go", "temperature": 0, "max_tokens": 500}'}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal parts
        if message["type"] == "http.response.body":
            parts += 1
        if parts >= 3:
            has_left.set()
            if spec_version == "2.4":
                raise OSError("the client has gone")
            await anyio.sleep_forever()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": spec_version},
        "method": "POST",
        "path": "/answer",
        "query_string": b"",
        "headers": [],
    }
    if spec_version == "2.4":
        with pytest.raises(ClientDisconnect):
            await app(scope, receive, send)
    else:
        await app(scope, receive, send)
