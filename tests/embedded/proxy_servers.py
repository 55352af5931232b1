"""Real proxies for tests: HTTP (CONNECT and forward) and SOCKS5 on asyncio.

A proxy requires a password, records its requests and fails on demand.
"""

from __future__ import annotations

import asyncio
import base64
import socket
from types import TracebackType
from typing import Self

USER, PASSWORD = "customer-77", "hunter2-PLANTED"


class Proxy:
    """A proxy on a free port of 127.0.0.1.

    `mood` is "" (works), "refuse" (answers that the target is unreachable) or "mute" (closes the
    connection without an answer).
    """

    def __init__(
        self,
        kind: str = "http",
        *,
        user: str = USER,
        password: str = PASSWORD,
        exit_: str = "127.0.0.10",
    ) -> None:
        self.kind, self.user, self.password, self.exit = kind, user, password, exit_
        self.mood = ""
        self.connects: list[str] = []  # targets as the client wrote them
        self.rejected = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening. The next `start` uses the same port."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def dsn(self) -> str:
        auth = f"{self.user}:{self.password}@" if self.user else ""
        return f"{self.kind}://{auth}127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self.mood != "mute":
                await (self._http if self.kind == "http" else self._socks)(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            method, target, _ = first.split(" ")
            headers = {
                k.strip().lower(): v.strip()
                for k, _, v in (line.partition(":") for line in lines if line)
            }
            wanted = "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
            if self.user and headers.get("proxy-authorization") != wanted:
                self.rejected += 1
                writer.write(
                    b"HTTP/1.1 407 Proxy Authentication Required\r\nproxy-authenticate: Basic\r\n"
                    b"content-length: 0\r\n\r\n"
                )
                await writer.drain()
                continue
            self.connects.append(target)
            if self.mood == "refuse":
                writer.write(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")
                await writer.drain()
                return
            if method == "CONNECT":
                host, _, port = target.rpartition(":")
                there = await self._dial(host.strip("[]"), int(port))
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await self._join(reader, writer, *there)
                return
            place, _, path = target.removeprefix("http://").partition("/")
            host, _, port = place.rpartition(":")
            back, out = await self._dial(host, int(port))
            passed = "".join(
                f"{k}: {v}\r\n"
                for k, v in headers.items()
                if not k.startswith("proxy-") and k != "connection"
            )
            try:
                out.write(
                    f"{method} /{path} HTTP/1.1\r\n{passed}connection: close\r\n\r\n".encode(
                        "latin-1"
                    )
                )
                while chunk := await back.read(65536):
                    writer.write(chunk)
                await writer.drain()
            finally:
                out.close()
            return

    async def _socks(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, n = await reader.readexactly(2)
        methods = await reader.readexactly(n)
        writer.write(b"\x05\x02" if self.user else b"\x05\x00")
        if self.user:
            if 2 not in methods:
                self.rejected += 1
                return
            await reader.readexactly(1)
            user = await reader.readexactly((await reader.readexactly(1))[0])
            password = await reader.readexactly((await reader.readexactly(1))[0])
            good = (user.decode(), password.decode()) == (self.user, self.password)
            writer.write(b"\x01\x00" if good else b"\x01\x01")
            if not good:
                self.rejected += 1
                await writer.drain()
                return
        _, _, _, kind = await reader.readexactly(4)
        if kind == 3:
            host = (await reader.readexactly((await reader.readexactly(1))[0])).decode()
        else:
            raw = await reader.readexactly(4 if kind == 1 else 16)
            host = socket.inet_ntop(socket.AF_INET if kind == 1 else socket.AF_INET6, raw)
        port = int.from_bytes(await reader.readexactly(2), "big")
        self.connects.append(f"{host}:{port}")
        if self.mood == "refuse":
            writer.write(b"\x05\x05\x00\x01\x00\x00\x00\x00\x00\x00")
            await writer.drain()
            return
        there = await self._dial(host, port)
        writer.write(b"\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00")
        await self._join(reader, writer, *there)

    async def _dial(
        self, host: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect from this proxy's own address, so that the target can identify the proxy."""
        return await asyncio.open_connection(host, port, local_addr=(self.exit, 0))

    async def _join(
        self,
        a: asyncio.StreamReader,
        aw: asyncio.StreamWriter,
        b: asyncio.StreamReader,
        bw: asyncio.StreamWriter,
    ) -> None:
        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            try:
                while chunk := await source.read(65536):
                    target.write(chunk)
                    await target.drain()
            finally:
                target.close()

        await asyncio.gather(copy(a, bw), copy(b, aw), return_exceptions=True)


class Asked:
    """One request as the target saw it."""

    def __init__(self, peer: str, path: str, headers: dict[str, str]) -> None:
        self.peer, self.path, self.headers = peer, path, headers

    @property
    def cookies(self) -> set[str]:
        return set(filter(None, self.headers.get("cookie", "").split("; ")))


class Target:
    """A site that records its requests. An answer is (status, extra header lines, body)."""

    PAGE = "<html><body><h1>a page</h1> that is too long to count as a challenge page</body></html>"

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        # By path. With a peer in front ("127.0.0.11/x"), the answer is only for that peer.
        self.answers: dict[str, tuple[int, list[str], str]] = {}
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def peers(self, path: str = "") -> list[str]:
        return [a.peer for a in self.asked if a.path.startswith(path) and a.path != "/robots.txt"]

    @property
    def direct(self) -> int:
        """Return the number of requests without a proxy, including those for robots.txt."""
        return sum(a.peer == "127.0.0.1" for a in self.asked)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")[0]
        try:
            while True:
                first, *lines = (
                    (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                )
                path = first.split(" ")[1]
                asked = Asked(
                    peer,
                    path,
                    {
                        k.strip().lower(): v.strip()
                        for k, _, v in (line.partition(":") for line in lines if line)
                    },
                )
                self.asked.append(asked)
                missing: tuple[int, list[str], str] = (
                    (404, [], "") if path == "/robots.txt" else (200, [], self.PAGE)
                )
                status, more, body = self.answers.get(peer + path) or self.answers.get(
                    path, missing
                )
                extra = "".join(f"{line}\r\n" for line in more)
                writer.write(
                    (
                        f"HTTP/1.1 {status} X\r\ncontent-type: text/html\r\n"
                        f"content-length: {len(body)}\r\n{extra}\r\n{body}"
                    ).encode()
                )
                await writer.drain()
                if asked.headers.get("connection") == "close":
                    return
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
