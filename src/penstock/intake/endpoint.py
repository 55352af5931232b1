"""The HTTP application of webhooks. It answers 202 only after the events are durable.

See `http_server` for sockets and connections.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.errors import RequestRefused, StoreUnavailable
from penstock.intake.accept import Incomplete, Intake, Taken
from penstock.intake.openapi import document
from penstock.model import Reason
from penstock.ports import (
    Accepted,
    Batch,
    Clock,
    Durability,
    Finding,
    ServedSource,
    Transaction,
    UnitOfWork,
)

log = logging.getLogger("penstock.serving")
MAX_HEAD = 16 << 10  # maximum bytes of a request's line and headers
RETRY_AFTER = 5.0  # seconds in Retry-After if the queue is full or the store is unavailable
HELD = 64 << 20  # maximum bytes of bodies that are being read, of all requests together
# Maximum bytes of a refused body that are read and discarded. A client that is still writing does
# not read the response.
DISCARDED = 8 << 20
TOLD = 20  # maximum number of reasons in one response
WHOLE = "penstock.whole"  # key in a request's scope: the body was read to the end
QUIET = 10.0  # seconds between two log lines about refused requests
HEADERS = {
    "content-type": "application/json",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
}
TRY = {
    404: "POST /hooks/NAME, with the name of a hook of this pipeline",
    405: "POST /hooks/NAME, GET /healthz, GET /openapi.json",
}


class RateLimiter:
    """A rate limit: `rate` requests per second, and up to `burst` requests after an idle time."""

    def __init__(self, rate: float, burst: int) -> None:
        self._interval, self._burst, self._next = 1 / rate, burst, -math.inf

    def wait(self, now: float) -> float:
        """Take one request and return 0, or return the seconds until a request is allowed."""
        full = max(self._next, now)
        if (early := full - (self._burst - 1) * self._interval - now) > 1e-9:
            return early
        self._next = full + self._interval
        return 0.0


class Hook:
    """One webhook source, with its rate limit and its intake."""

    def __init__(self, source: ServedSource, url: str, intake: Intake) -> None:
        self.source, self.url, self.intake = source, url, intake
        self.limiter = RateLimiter(source.rate, source.burst)
        self.refused: Counter[int] = Counter()
        self.said = -math.inf


class Endpoint:
    """Serves the webhooks of one pipeline."""

    def __init__(
        self,
        hooks: Sequence[Hook],
        uow: UnitOfWork,
        clock: Clock,
        *,
        worker: str,
        timeout: float,
    ) -> None:
        self.hooks = {hook.source.path: hook for hook in hooks}
        self._uow, self._clock, self._worker, self._timeout = uow, clock, worker, timeout
        self._held = 0

    async def declare(self) -> None:
        """Record the webhooks in the ledger, so that `penstock sources` can list and pause them.

        Repeats every second while the store is unavailable.
        """

        def work(tx: Transaction) -> None:
            for hook in self.hooks.values():
                tx.sources.declare(hook.source.name, hook.url)
                by = f"signed ({hook.source.signed})" if hook.source.signed else "unsigned"
                tx.sources.note(
                    hook.source.name,
                    worker=self._worker,
                    position=f"{hook.source.path}, {by}",
                    error=None,
                )

        while True:
            try:
                return await self._uow.write(work, durability=Durability.RELAXED)
            except StoreUnavailable as e:
                log.warning("%s", e.message)
            await self._clock.sleep(1.0)

    def app(self) -> Starlette:
        handlers: dict[Any, Any] = {HTTPException: _other, StoreUnavailable: _away, Exception: _bug}
        routes = [
            Route("/hooks/{name}", self._handle, methods=["POST"]),
            Route("/healthz", _health, methods=["GET"]),
            Route("/openapi.json", _schema, methods=["GET"]),
        ]
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return app

    # -- one request -------------------------------------------------------------------------------

    async def _handle(self, request: Request) -> Response:
        # Read the path from the scope. `request.url` fails if the Host header is not a valid host.
        hook = self.hooks.get(request.scope["path"])
        if hook is None:
            await self._discard(request, 0)
            raise HTTPException(404)
        try:
            return await self._take(hook, request)
        except ClientDisconnect:
            return Response(status_code=400)  # the client has disconnected and does not read it
        except RequestRefused as e:
            self._count(hook, e)
            headers = (
                {
                    "www-authenticate": "Bearer"
                    if hook.source.signed == "bearer"
                    else "Webhook-Signature"
                }
                if e.status == 401
                else {}
            )
            if not request.scope.get(WHOLE):
                # Close the connection. The rest of the body would be parsed as the next request.
                headers["connection"] = "close"
            return _answer(e, headers)

    async def _take(self, hook: Hook, request: Request) -> Response:
        source = hook.source
        if sum(len(name) + len(value) for name, value in request.headers.raw) > MAX_HEAD:
            raise RequestRefused(
                431,
                f"its headers have more than {MAX_HEAD} bytes",
                hint="leave out cookies and the like",
            )
        headers: dict[str, list[str]] = {}
        for name, value in request.headers.raw:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        # A proxy in front of this server may end the body by the other of the two headers.
        if "content-length" in headers and "transfer-encoding" in headers:
            raise RequestRefused(
                400,
                "it has both a content-length and a transfer-encoding",
                hint="leave both to your client",
            )
        try:
            if wait := hook.limiter.wait(asyncio.get_running_loop().time()):
                raise RequestRefused(
                    429,
                    "this hook is told more often than it allows",
                    hint="wait, and send it again with the same id",
                    after=wait,
                )
            source.screen(request.method, headers)
        except RequestRefused:
            if "expect" not in headers:  # with Expect, the client has not sent the body yet
                await self._discard(request, 0)
            raise
        body = await self._body(request, source.max_body)
        findings = source.findings(request.method, headers, body, self._clock.now())
        taken = await self._accept(hook, findings)
        return _json(
            202,
            {
                "accepted": taken.answers.count(Accepted.NEW),
                "known": taken.answers.count(Accepted.KNOWN),
                "passed": taken.skipped,
                "ids": [event.id for event in taken.events],
            },
        )

    async def _body(self, request: Request, most: int) -> bytes:
        """Read the body, with at most `most` bytes and within the timeout.

        Raises RequestRefused if the body is too large or too slow, or if all bodies that are being
        read would together exceed `HELD`.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout):
                async for chunk in request.stream():
                    if len(body) + len(chunk) > most:
                        raise RequestRefused(
                            413,
                            f"the body is larger than {most} bytes",
                            hint="send several requests",
                        )
                    if self._held + len(chunk) > HELD:
                        raise RequestRefused(
                            503, "too much is being sent at once", hint="send it again", after=1.0
                        )
                    self._held += len(chunk)
                    body += chunk
            request.scope[WHOLE] = True
            return bytes(body)
        except TimeoutError:
            raise RequestRefused(
                408,
                f"the body did not come within {self._timeout:g} s",
                hint="send it again, all at once",
            ) from None
        except RequestRefused:
            await self._discard(request, len(body))
            raise
        finally:
            self._held -= len(body)

    async def _discard(self, request: Request, seen: int) -> None:
        """Read and discard the rest of a refused body, for at most 2 s.

        If the server closed the connection during the request, the client would lose the response.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(min(2.0, self._timeout)):
                while seen < DISCARDED:
                    message = await request.receive()
                    seen += len(message.get("body", b""))
                    if message["type"] != "http.request" or not message.get("more_body"):
                        request.scope[WHOLE] = True
                        return

    async def _accept(self, hook: Hook, findings: Sequence[Finding]) -> Taken:
        """Accept all findings of a request, or none.

        The store combines requests that arrive together into one transaction.
        """

        def check_pause(tx: Transaction, taken: Taken) -> None:
            state = tx.sources.state(hook.source.name)
            if state is not None and state.paused:
                raise RequestRefused(
                    503,
                    "this hook is paused",
                    hint="send it again later, with the same id",
                    after=60.0,
                )

        batch = Batch(findings=findings)
        try:
            return await hook.intake.take(batch, whole=True, in_transaction=check_pause)
        except Incomplete as e:
            if e.taken.refused:
                raise _makes_none(findings, e.taken) from None
            raise RequestRefused(
                503,
                "the queue is full",
                hint="send it again later, with the same id",
                after=RETRY_AFTER,
            ) from None

    def _count(self, hook: Hook, e: RequestRefused) -> None:
        """Count a refused request. Log the counts at most every `QUIET` seconds."""
        hook.refused[e.status] += 1
        now = asyncio.get_running_loop().time()
        if now - hook.said >= QUIET:
            counts = ", ".join(f"{status} × {n}" for status, n in sorted(hook.refused.items()))
            log.warning(
                "hook %s refused requests (%s); the last one: %s",
                hook.source.name,
                counts,
                e.why or e.message,
            )
            hook.refused.clear()
            hook.said = now


# -- answers ---------------------------------------------------------------------------------------


def _makes_none(findings: Sequence[Any], taken: Taken) -> RequestRefused:
    places = {id(finding): i for i, finding in enumerate(findings)}
    # An exception of the user's hook may contain any text, so the sender gets a fixed sentence.
    reasons = [
        {
            "item": places[id(finding)],
            "reason": "the pipeline's hook failed on it" if code is Reason.HOOK else reason,
        }
        for finding, reason, code in taken.refused[:TOLD]
    ]
    refused = RequestRefused(
        422,
        f"{len(taken.refused)} of {len(findings)} items make no event, so none was accepted",
        hint="correct or leave out the items that `reasons` lists",
        why=taken.refused[0][1],
    )
    refused.reasons = reasons
    return refused


def _json(status: int, content: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, {**HEADERS, **(headers or {})})


def error(message: str, hint: str) -> bytes:
    """Return the JSON body of an error response."""
    return msgspec.json.encode({"error": message, "try": hint})


def _answer(e: RequestRefused, headers: dict[str, str]) -> Response:
    if e.after is not None:
        headers["retry-after"] = str(max(1, math.ceil(e.after)))
    return _json(
        e.status,
        {"error": e.message, "try": e.hint} | ({"reasons": e.reasons} if e.reasons else {}),
        headers,
    )


async def _other(request: Request, e: HTTPException) -> Response:
    return _json(
        e.status_code,
        {"error": e.detail, "try": TRY.get(e.status_code, "")},
        {**(e.headers or {}), "connection": "close"},
    )


async def _away(request: Request, e: StoreUnavailable) -> Response:
    log.error("%s", e.message)
    return _answer(
        RequestRefused(
            503,
            "the store is not available",
            hint="send it again later, with the same id",
            after=RETRY_AFTER,
        ),
        {},
    )


async def _bug(request: Request, e: Exception) -> Response:
    # The server logs the exception.
    return _json(500, {"error": "this should not happen", "try": "our log says more"})


async def _health(request: Request) -> Response:
    return _json(200, {"status": "ok"})


async def _schema(request: Request) -> Response:
    return _json(200, document())
