"""A web application that streams answers as server-sent events.

It needs `pip install -e '.[examples]'`. Start it with `python examples/starlette_app.py [MODEL]`, then ask:

    curl --no-buffer -d '{"prompt": "What is the capital of France?"}' http://127.0.0.1:8000/answer

The engine runs in the process of the server. A client that goes away ends its request.
"""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from omni_async import Engine, EventStream, OmniError, QueueFull, Request, RequestError, SamplingParams, TextDelta
from omni_async.cli import find_default_model


def make_app(engine: Engine) -> Starlette:
    """An application around an engine that has not been entered yet."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with engine:
            yield

    async def answer(http: HttpRequest) -> Response:
        try:
            events = engine.stream(make_request(await http.json()))
        except (RequestError, json.JSONDecodeError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        except QueueFull as error:
            return JSONResponse({"error": str(error)}, status_code=503)
        return EventResponse(events)

    async def stats(http: HttpRequest) -> Response:
        return JSONResponse({name: asdict(stage) for name, stage in engine.stats().items()})

    routes = [Route("/answer", answer, methods=["POST"]), Route("/stats", stats)]
    return Starlette(routes=routes, lifespan=lifespan)


def make_request(body: Any) -> Request:
    """The request that a client's JSON describes.

    Raises:
        RequestError: the JSON has another form, or a value is illegal.
    """
    if not isinstance(body, dict) or not isinstance(body.get("prompt"), str):
        raise RequestError(f'the body must be an object with a string "prompt", got {body!r}')
    sampling = SamplingParams(max_tokens=body.get("max_tokens", 256), temperature=body.get("temperature"))
    return Request(messages=[{"role": "user", "content": body["prompt"]}], sampling=sampling)


class EventResponse(StreamingResponse):
    """Events as they come; the request ends when the response does, also when the client goes away."""

    def __init__(self, events: EventStream) -> None:
        super().__init__(server_sent(events), media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Nobody closes an async generator that is left midway, so `server_sent` cannot do this."""
        async with self._events:
            await super().__call__(scope, receive, send)


async def server_sent(events: EventStream) -> AsyncIterator[str]:
    """Events as lines for the client."""
    try:
        async for event in events:
            if isinstance(event, TextDelta):
                yield f"data: {json.dumps({'text': event.text})}\n\n"
            else:
                yield f"event: end\ndata: {json.dumps({'reason': event.reason, 'usage': asdict(event.usage)})}\n\n"
    except OmniError as error:  # the status has been sent, so the client learns it this way
        yield f"event: error\ndata: {json.dumps({'error': str(error)})}\n\n"


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else str(find_default_model())
    uvicorn.run(make_app(Engine.from_pretrained(model)), port=8000)
