"""The HTTP application of webhooks. It answers 202 only after the events are durable.

See `http_server` for sockets and connections.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.errors import RequestRefused, StoreUnavailable
from penstock.intake.accept import Incomplete, Intake, Taken
from penstock.intake.bodies import MIN_BUDGET, UNTRUSTED_SHARE, Body, BodyBudget, no_memory
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
from penstock.rules.senders import (
    AddressLimits,
    Network,
    RateLimiter,
    Unverified,
    address_group,
    sender,
)

T = TypeVar("T")
log = logging.getLogger("penstock.serving")
MAX_HEAD = 16 << 10  # maximum bytes of a request's line and headers
RETRY_AFTER = 5.0  # seconds in Retry-After if the queue is full or the store is unavailable
# Bytes. Larger bodies are verified and parsed in a thread. 1 MiB takes about 10 ms.
LARGE = 1 << 20
# Maximum bytes of a body that is verified for an address with too many forged requests.
SMALL = 64 << 10
ADDRESS_SHARE = 0.5  # of the rate of an unsigned hook that one address may use
TOLD = 20  # maximum number of reasons in one response
WHOLE = "penstock.whole"  # key in a request's scope: the body was read to the end
VERIFIED = "penstock.verified"  # key in a request's scope: it is signed, or need not be
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


class Hook:
    """One webhook source, with its rate limits and its intake."""

    def __init__(self, source: ServedSource, url: str, intake: Intake) -> None:
        self.source, self.url, self.intake = source, url, intake
        self._limiter = RateLimiter(source.rate, source.burst)
        # Addresses that may send unsigned requests. One of them cannot use the whole rate.
        self._addresses = (
            AddressLimits(source.rate * ADDRESS_SHARE, max(1, int(source.burst * ADDRESS_SHARE)))
            if not source.signed and not source.local
            else None
        )
        self.refused: Counter[int] = Counter()
        self.said = -math.inf

    def charge(self, address: str, now: float) -> None:
        """Count a request, which is verified unless the hook is unsigned. Raises RequestRefused."""
        wait = self._addresses.wait(address, now) if self._addresses is not None else 0.0
        if wait := wait or self._limiter.wait(now):
            raise _too_often(wait)


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
        proxies: Sequence[Network] = (),
    ) -> None:
        self.hooks = {hook.source.path: hook for hook in hooks}
        self._uow, self._clock, self._worker, self._timeout = uow, clock, worker, timeout
        self._proxies = proxies
        self._unverified = Unverified()
        largest = max((hook.source.max_body for hook in hooks), default=0)
        self._bodies = BodyBudget(max(MIN_BUDGET, int(largest / UNTRUSTED_SHARE)))
        self._large = asyncio.Semaphore(1)

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
        handlers: dict[Any, Any] = {
            HTTPException: self._other,
            StoreUnavailable: _away,
            Exception: _bug,
        }
        routes = [
            Route("/hooks/{name}", self._handle, methods=["POST"]),
            Route("/healthz", self._health, methods=["GET"]),
            Route("/openapi.json", self._schema, methods=["GET"]),
        ]
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return app

    # -- one request -------------------------------------------------------------------------------

    async def _handle(self, request: Request) -> Response:
        # Read the path from the scope. `request.url` fails if the Host header is not a valid host.
        hook = self.hooks.get(request.scope["path"])
        if hook is None:
            raise HTTPException(404)
        try:
            return await self._take(hook, request)
        except ClientDisconnect:
            return Response(status_code=400)  # the client has disconnected and does not read it
        except RequestRefused as e:
            # A variable with the exception would be a reference cycle, which keeps the body until
            # a garbage collection.
            return self._refuse(hook, request, e)

    def _refuse(self, hook: Hook, request: Request, e: RequestRefused) -> Response:
        if not request.scope.get(VERIFIED):
            e = self._charge_refused(request, e)
        self._count(hook, e)
        headers = {}
        if e.status == 401:
            headers["www-authenticate"] = (
                "Bearer" if hook.source.signed == "bearer" else "Webhook-Signature"
            )
        if not request.scope.get(WHOLE) or not request.scope.get(VERIFIED):
            headers["connection"] = "close"
        return _answer(e, headers)

    async def _take(self, hook: Hook, request: Request) -> Response:
        """Take a request. Everything that the headers show is checked before the body is read."""
        source, address = hook.source, self._sender(request)
        loop = asyncio.get_running_loop()
        headers = _checked_headers(request)
        claim = source.screen(request.method, headers, self._clock.now())
        if claim is None:
            # The request is unsigned, or its token is verified.
            request.scope[VERIFIED] = True
            if source.signed:
                self._unverified.verified(address, loop.time())
            hook.charge(address, loop.time())
        else:
            self._check_size(headers, address, loop.time())
        trusted = bool(source.signed) and (
            claim is None or self._unverified.is_known(address, loop.time())
        )
        body = await self._body(request, trusted, address, source.max_body)
        data = self._bodies.complete(body)
        try:
            signed_id = await self._work(data, source.verify, claim, data)
            if claim is not None:
                request.scope[VERIFIED] = True
                self._unverified.verified(address, loop.time())
                hook.charge(address, loop.time())
            findings = await self._work(data, source.findings, headers, data, signed_id)
            taken = await self._accept(hook, findings)
        finally:
            self._bodies.close(body)
        return _json(
            202,
            {
                "accepted": taken.answers.count(Accepted.NEW),
                "known": taken.answers.count(Accepted.KNOWN),
                "passed": taken.skipped,
                "ids": [event.id for event in taken.events],
            },
        )

    def _check_size(self, headers: dict[str, list[str]], address: str, now: float) -> None:
        """Refuse a large body from an address that sent too many forged requests.

        Small bodies are always verified: a signed sender may have the same address, for example
        behind a proxy. The limit does not apply to an address that had a verified request in the
        last hour.
        """
        wait = self._unverified.early(address, now)
        if wait and not self._unverified.is_known(address, now):
            length = headers.get("content-length")
            if length is None or int(length[0]) > SMALL:
                raise _too_often(wait)

    async def _body(self, request: Request, trusted: bool, address: str, most: int) -> Body:
        """Read the body, with at most `most` bytes and within the timeout. The caller closes it."""
        loop = asyncio.get_running_loop()
        deadline = asyncio.timeout(self._timeout)
        body = self._bodies.open(trusted, address, lambda: deadline.reschedule(loop.time()))
        try:
            async with deadline:
                async for chunk in request.stream():
                    if body.size + len(chunk) > most:
                        raise RequestRefused(
                            413,
                            f"the body is larger than {most} bytes",
                            hint="send several requests",
                        )
                    self._bodies.add(body, chunk)
                if body.evicted:
                    raise no_memory()
            request.scope[WHOLE] = True
            return body
        except TimeoutError:
            self._bodies.close(body)
            if body.evicted:
                raise no_memory() from None
            raise RequestRefused(
                408,
                f"the body did not come within {self._timeout:g} s",
                hint="send it again, all at once",
            ) from None
        except BaseException:
            self._bodies.close(body)
            raise

    async def _work(self, body: bytes, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function that reads the whole body. A large body uses a thread, one at a time."""
        if len(body) <= LARGE:
            return work(*arguments)
        async with self._large:
            return await asyncio.to_thread(work, *arguments)

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

    # -- senders -----------------------------------------------------------------------------------

    def _sender(self, request: Request) -> str:
        """Return the address of the sender, for its limits."""
        client = request.scope.get("client")
        return sender(
            client[0] if client else "",
            lambda: request.headers.getlist("x-forwarded-for"),
            self._proxies,
        )

    def charge_unreadable(self, peer: str) -> None:
        """Count a request that could not be parsed."""
        self._unverified.charge(address_group(peer), asyncio.get_running_loop().time())

    def _charge(self, request: Request) -> float:
        """Count a request that is not verified. Return the seconds to wait, 0 within the limits."""
        return self._unverified.charge(self._sender(request), asyncio.get_running_loop().time())

    def _charge_refused(self, request: Request, e: RequestRefused) -> RequestRefused:
        if e.status < 500 and (wait := self._charge(request)):
            return _too_often(wait, e.why or e.message)
        return e

    async def _other(self, request: Request, e: HTTPException) -> Response:
        refused = self._charge_refused(
            request, RequestRefused(e.status_code, e.detail, hint=TRY.get(e.status_code, ""))
        )
        return _answer(refused, {**(e.headers or {}), "connection": "close"})

    async def _health(self, request: Request) -> Response:
        # It is always answered: a load balancer and a stranger may have the same address.
        return _json(
            200, {"status": "ok"}, {"connection": "close"} if self._charge(request) else {}
        )

    async def _schema(self, request: Request) -> Response:
        if wait := self._charge(request):
            return _answer(_too_often(wait), {"connection": "close"})
        return _json(200, document())

    def _count(self, hook: Hook, e: RequestRefused) -> None:
        """Count a refused request. Log the counts at most every `QUIET` seconds."""
        hook.refused[e.status] += 1
        now = asyncio.get_running_loop().time()
        if now - hook.said >= QUIET:
            counts = ", ".join(f"{status} × {n}" for status, n in sorted(hook.refused.items()))
            log.warning(
                "hook %s refused requests (%s). The last one: %s",
                hook.source.name,
                counts,
                e.why or e.message,
            )
            hook.refused.clear()
            hook.said = now


def _checked_headers(request: Request) -> dict[str, list[str]]:
    """Return the headers of a request, by lower-case name. Raises RequestRefused."""
    if sum(len(name) + len(value) for name, value in request.headers.raw) > MAX_HEAD:
        raise RequestRefused(
            431,
            f"its headers have more than {MAX_HEAD} bytes",
            hint="leave out cookies and the like",
        )
    headers: dict[str, list[str]] = {}
    for name, value in request.headers.raw:
        headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return headers


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


def _too_often(wait: float, why: str = "") -> RequestRefused:
    return RequestRefused(
        429,
        "there are too many requests",
        hint="wait, and send it again with the same id",
        after=wait,
        why=why,
    )


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
    return _json(500, {"error": "this should not happen", "try": "see the log of Penstock"})
