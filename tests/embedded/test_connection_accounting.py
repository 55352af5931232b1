"""Connections of the webhook server: clients that disconnect at any moment leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.intake.connections import Connections, protocol

HEAD = b"POST /body HTTP/1.1\r\nhost: a\r\n"
REQUESTS = [
    HEAD + b"content-length: 200000\r\n\r\n" + b"x" * 200_000,
    HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"400\r\n" + b"x" * 1024 + b"\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 3000,  # too many small chunks
    HEAD + b"expect: 100-continue\r\ncontent-length: 5\r\n\r\nhello",
    HEAD + b"a: b\r\n" * 5000,  # too large
    b"GET /early HTTP/1.1\r\nhost: a\r\n\r\n" * 2000,  # pipelined
    b"GET /early HTTP/1.1\r\nhost: a\r\ncontent-length: 300000\r\n\r\n" + b"y" * 300_000,
    b"GET /early HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    b"GET /late HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /early HTTP/1.0\r\n\r\n",
    b"\x16\x03\x01 not HTTP\r\n\r\n",
]


async def read_body(request: Request) -> Response:
    return Response(str(len(await request.body())))


async def answer_early(request: Request) -> Response:
    return Response("ok")


async def answer_late(request: Request) -> Response:
    await asyncio.sleep(0.3)
    return Response("ok")


APP = Starlette(
    routes=[
        Route("/body", read_body, methods=["POST"]),
        Route("/early", answer_early),
        Route("/late", answer_late),
    ]
)


async def client(port: int, rng: random.Random) -> None:
    """Send requests, or the beginning of them, in pieces. Then leave in one of five ways."""
    sent = rng.choice(REQUESTS) + rng.choice([b"", rng.choice(REQUESTS)])
    sent = sent[: rng.choice([len(sent), rng.randrange(len(sent))])]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(OSError):
        for _ in range(rng.randint(1, 4)):
            size = rng.randint(1, len(sent) or 1)
            writer.write(sent[:size])
            sent = sent[size:]
            await asyncio.sleep(rng.choice([0, 0, 0.01]))
        match rng.randrange(5):
            case 0:
                writer.transport.abort()
            case 1:
                writer.write_eof()
            case 2:
                await asyncio.wait_for(reader.read(100), 0.5)
            case 3:
                await asyncio.sleep(0.3)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def test_no_connection_stays_counted_after_its_client_left() -> None:
    rng, table, errors = random.Random(1), Connections(20, 20), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    config = uvicorn.Config(
        APP,
        host="127.0.0.1",
        port=0,
        http=protocol(table, 1.0, lambda address: None),
        ws="none",
        lifespan="off",
        log_config=None,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    state = server.server_state
    for _ in range(5):  # twice as many clients as connections
        await asyncio.gather(*(client(port, rng) for _ in range(40)))
    assert state.total_requests > 40
    async with asyncio.timeout(10):
        while len(table) or state.connections or state.tasks:  # noqa: ASYNC110 (as above)
            await asyncio.sleep(0.05)
    assert table._waiting == {None: {}}
    assert not table._counts
    assert not errors
    server.should_exit = True
    await serving
