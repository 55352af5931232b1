"""HTTP client of the product: address check, pinned address, proxy, one exchange.

Redirects, robots.txt and rate limits are handled in `fetching.stage`.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

import certifi
import msgspec
import pycurl

from penstock.model import ErrorClass, Failure, Reason
from penstock.net.decoding import ACCEPT_ENCODING, BrokenCoding, TooManyCodings
from penstock.net.exchange import BodyMemory, Exchange, HttpOptions, SetUp, ignore_result
from penstock.net.guard import Guard, Target
from penstock.net.transfer import Engine
from penstock.ports import Done, Response, Traffic
from penstock.rules.identity import BadUrl, authority, canonical_url
from penstock.rules.proxies import ProxyFailed
from penstock.rules.reasons import sentence
from penstock.rules.speed import Scarcity
from penstock.rules.verdict import LIMITS, breach, transport

__all__ = ["CurlFetcher", "HttpOptions", "parse_proxy"]

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
# Headers that libcurl or this client sets. A value from outside could split the message or change
# its destination.
_RESERVED = frozenset(
    {
        "host",
        "connection",
        "content-length",
        "transfer-encoding",
        "te",
        "trailer",
        "upgrade",
        "expect",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
    }
)
_name = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}").fullmatch
_value = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*").fullmatch
_MAX_ADDRESSES = 3  # addresses of a name, tried in turn until one accepts a connection
_E_PROXY = 97  # CURLE_PROXY, which pycurl does not define
_NO_PIN = ("",)  # for a literal address, or a name that the proxy resolves (remote_dns)
_MAX_PROXY_POOLS = 64  # proxies whose connection pool is kept open
# Seconds for which a checked target is used for further requests. The guard caches it for longer.
_TARGET_TTL = 1.0


# -- proxies ---------------------------------------------------------------------------------------


class _Proxy(msgspec.Struct, frozen=True):
    scheme: str
    host: str
    port: int
    user: str
    password: str


def parse_proxy(dsn: str) -> _Proxy:
    """Parse `http|https|socks5|socks5h://[user:password@]host:port`.

    Raise Failure without the DSN, which contains a password.
    """
    try:
        parts = urlsplit(dsn)
        port = parts.port
    except ValueError:
        raise breach(Reason.BAD_PROXY, "its URL cannot be read") from None
    if parts.scheme not in ("http", "https", "socks5", "socks5h"):
        raise breach(Reason.BAD_PROXY, "its scheme is not http, https, socks5 or socks5h")
    if not parts.hostname or not port:
        raise breach(Reason.BAD_PROXY, "its URL has no host or no port")
    return _Proxy(
        parts.scheme,
        parts.hostname,
        port,
        unquote(parts.username or ""),
        unquote(parts.password or ""),
    )


class _ProxyHop(msgspec.Struct, frozen=True):
    proxy: _Proxy
    target: Target


# -- the fetcher -----------------------------------------------------------------------------------


def _ca_file(options: HttpOptions) -> str:
    """Return the file of certificate authorities. libcurl's wheel does not know its path."""
    known = (
        options.ca_file,
        ssl.get_default_verify_paths().cafile,
        "/etc/ssl/certs/ca-certificates.crt",
        "/etc/pki/tls/certs/ca-bundle.crt",
        "/etc/ssl/cert.pem",
    )
    return next((path for path in known if path and Path(path).is_file()), "") or certifi.where()


class CurlFetcher:
    """ports.Fetcher. Opens on first use, in the running event loop. `close` ends all exchanges."""

    def __init__(
        self, guard: Guard, options: HttpOptions | None = None, traffic: Traffic | None = None
    ) -> None:
        self._traffic = traffic
        self.guard, self.options = guard, options or HttpOptions()
        self._opened: tuple[SetUp, Engine] | None = None
        self._proxied: OrderedDict[str, Engine] = OrderedDict()
        self._free: list[Exchange] = []
        self._preferred: dict[str, str] = {}
        self._targets: dict[str, tuple[float, Target]] = {}
        self._closed = False
        # Returns the lowest accepted speed, or None if permits are not scarce. A worker sets it.
        self.scarcity: Callable[[], Scarcity | None] = lambda: None

    async def fetch(
        self,
        url: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        proxy: str | None = None,
    ) -> Response:
        try:
            url = canonical_url(url)
        except BadUrl as e:
            raise breach(Reason.BAD_URL, e.reason) from None
        self._check_open()
        set_up, engine = self._opened or self._open()
        via: _ProxyHop | None = None
        if proxy is None:
            known = self._targets.get(url[: url.index("/", 8)])
            target = (
                known[1]
                if known is not None and known[0] > set_up.now()
                else await self._resolve(url, set_up)
            )
        else:
            via, target, engine = await self._prepare_proxy(proxy, url)
        self._check_open()  # again, because it may have been closed during the address lookup
        answer: asyncio.Future[Response | BaseException] = (
            asyncio.get_running_loop().create_future()
        )
        done = partial(_set_result, answer)
        ex = self._send(
            engine, url, target, done, method=method, headers=headers, body=body, via=via, dsn=proxy
        )
        try:
            response = await answer
        except asyncio.CancelledError:
            if ex.done is done:  # otherwise it has ended, and another request may use it
                ex.cancel()
            raise
        if isinstance(response, Response):
            return response
        raise response

    def begin(self, url: str, headers: Mapping[str, str], done: Done) -> Exchange | None:
        """See ports.DirectFetcher."""
        if self._opened is None or self._closed:
            return None
        set_up, engine = self._opened
        # The text before the path equals an origin that the guard has checked, so the request goes
        # to that origin.
        known = self._targets.get(url[: url.find("/", 8)])
        if known is None or known[0] <= set_up.now():
            return None
        try:
            return self._send(engine, url, known[1], done, headers=headers)
        except Failure:
            return None  # `fetch` fails the same way and raises the failure

    def _send(
        self,
        engine: Engine,
        url: str,
        target: Target,
        done: Done,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        via: _ProxyHop | None = None,
        dsn: str | None = None,
    ) -> Exchange:
        """Start an exchange. `done` is called with its result."""
        set_up = (self._opened or self._open())[0]
        ex = self._free.pop() if self._free else Exchange(set_up)
        try:
            if headers or method != "GET" or body is not None or via is not None:
                _configure(ex, set_up, method, headers, body, via, target)
            pins = (
                _NO_PIN
                if not target.addresses or target.addresses[0] == target.host
                else self._pins(target)
            )
            ex.url, ex.pins, ex.proxy, ex.done = url, pins, dsn, done
            ex.set_target(url, target if via is None else via.target, pins[0])
            engine.start(ex, self._on_end)
        except pycurl.error as e:
            self._reuse(ex)
            raise _refused_by_libcurl(e) from None
        except BaseException:
            self._reuse(ex)
            raise
        return ex

    def _on_end(self, ex: Exchange, error: tuple[int, str] | None) -> None:
        answer: Response | BaseException
        if self._traffic is not None:
            self._traffic.count(ex.proxy, ex.wire_bytes())
        try:
            if ex.cancelled:
                answer = asyncio.CancelledError()
            elif error is None and ex.failure is None:
                answer = _response(ex, ex.url)
            else:
                answer = failure = _failure(ex, error, ex.proxy is not None)
                if (
                    len(ex.pins) > 1
                    and not ex.ready_at
                    and failure.kind is ErrorClass.TRANSIENT
                    and failure.code is not Reason.SLOW
                    and not self._closed
                ):
                    self._try_next(ex)
                    return
        except Failure as e:
            answer = e
        except pycurl.error as e:
            answer = _refused_by_libcurl(e)
        except Exception as e:  # a bug, which the caller must see as a failure
            answer = Failure(
                ErrorClass.OURS, f"the answer could not be read: {type(e).__name__}: {e}"
            )
        done = ex.done
        self._reuse(ex)
        done(answer)

    def _try_next(self, ex: Exchange) -> None:
        """Try the next address of the name, because the last one did not accept a connection."""
        target, engine, ex.pins = ex.target, ex.engine, ex.pins[1:]
        assert target is not None
        assert engine is not None
        ex.clear()
        self._preferred[authority(ex.url).host] = ex.pins[0]
        ex.set_target(ex.url, target, ex.pins[0])
        engine.start(ex, self._on_end)

    def _reuse(self, ex: Exchange) -> None:
        ex.done = ignore_result
        if self._closed:
            ex.curl.close()
        else:
            ex.restore()
            self._free.append(ex)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._opened is not None:
            self._opened[1].close()
        for engine in self._proxied.values():
            engine.close()
        for ex in self._free:
            ex.curl.close()
        self._free.clear()

    # -- implementation

    def _check_open(self) -> None:
        if self._closed:
            raise breach(Reason.CLOSED)

    def _pins(self, target: Target) -> tuple[str, ...]:
        """Return the checked addresses of a name.

        After a failed connection, the address that was tried next comes first.
        """
        pins, last_good = target.addresses, self._preferred.get(target.host)
        if last_good is not None and last_good in pins:
            pins = last_good, *(p for p in pins if p != last_good)
        elif len(self._preferred) > 8192:
            self._preferred.clear()
        return pins[:_MAX_ADDRESSES]

    def _open(self) -> tuple[SetUp, Engine]:
        loop = asyncio.get_running_loop()
        headers = [f"Accept: {self.options.accept}", f"Accept-Encoding: {ACCEPT_ENCODING}"]
        bodies = BodyMemory(self.options.max_held_bytes, loop.time)
        self._opened = (
            SetUp(self.guard, self.options, headers, _ca_file(self.options), loop.time, bodies),
            self._open_engine(loop),
        )
        return self._opened

    def _open_engine(self, loop: asyncio.AbstractEventLoop) -> Engine:
        return Engine(loop, self.options, lambda: self.scarcity())

    async def _resolve(self, url: str, set_up: SetUp) -> Target:
        target = await self.guard.resolve(url)
        if len(self._targets) >= 8192:
            self._targets.clear()
        self._targets[url[: url.index("/", 8)]] = set_up.now() + _TARGET_TTL, target
        return target

    async def _prepare_proxy(self, dsn: str, url: str) -> tuple[_ProxyHop, Target, Engine]:
        proxy = parse_proxy(dsn)
        if proxy.scheme == "socks5h" and not self.options.remote_dns:
            raise breach(
                Reason.BAD_PROXY,
                "socks5h resolves names at the proxy; use socks5, or allow it with remote_dns",
            )
        target = (
            self.guard.check_url(url) if self.options.remote_dns else await self.guard.resolve(url)
        )
        try:
            via = _ProxyHop(
                proxy, await self.guard.resolve_proxy(proxy.host, proxy.port, scheme=proxy.scheme)
            )
        except Failure as e:
            raise ProxyFailed(
                e.kind, f"the proxy's own address: {e.reason}", own=True, detail=e.detail
            ) from None
        self._check_open()
        # A separate pool for each DSN: libcurl would reuse a tunnel of another user name.
        engine = self._proxied.get(dsn)
        if engine is None:
            engine = self._proxied[dsn] = self._open_engine(asyncio.get_running_loop())
            idle = [k for k, e in self._proxied.items() if not e.active and e is not engine]
            for k in idle[: max(0, len(self._proxied) - _MAX_PROXY_POOLS)]:
                self._proxied.pop(k).close()
        else:
            self._proxied.move_to_end(dsn)
        return via, target, engine


def _configure(
    ex: Exchange,
    set_up: SetUp,
    method: str,
    headers: Mapping[str, str] | None,
    body: bytes | None,
    via: _ProxyHop | None,
    target: Target,
) -> None:
    """Set everything beyond a plain GET. `Exchange.restore` resets it."""
    opt = ex.curl.setopt
    given: dict[str, tuple[str, str | None]] = {}  # None removes a header that libcurl adds
    for name, value in (headers or {}).items():
        if name.lower() in _RESERVED or not _name(name) or not _value(value):
            raise breach(Reason.BAD_REQUEST, f"header {name[:40]!r}")
        given[name.lower()] = name, value
    if method != "GET" or body is not None:
        if method not in _METHODS:
            raise breach(Reason.BAD_REQUEST, f"method {method[:20]!r}")
        ex.plain = False
        if method == "HEAD":
            opt(pycurl.NOBODY, 1)
        else:
            if body is not None or method == "POST":
                opt(pycurl.POSTFIELDS, body or b"")
                given.setdefault("expect", ("Expect", None))
                given.setdefault("content-type", ("Content-Type", None))
            opt(pycurl.CUSTOMREQUEST, method)
        if method not in _IDEMPOTENT:
            opt(pycurl.FRESH_CONNECT, 1)  # libcurl may repeat a request on a reused connection
    if given:
        ex.plain_headers = False
        lines = [line for line in set_up.headers if line.partition(":")[0].lower() not in given]
        lines += [
            f"{name}:" if sent is None else f"{name}: {sent}" if sent.strip() else f"{name};"
            for name, sent in given.values()
        ]
        try:
            opt(pycurl.HTTPHEADER, [line.encode() for line in lines])
        except UnicodeEncodeError:
            raise breach(Reason.BAD_REQUEST, "a header is not text") from None
    if via is not None:
        ex.plain = False
        proxy, address = via.proxy, via.target.ip
        address_text = f"[{address}]" if ":" in address else address
        if proxy.scheme == "https":  # the certificate is for the proxy's name
            opt(pycurl.RESOLVE, [f"{proxy.host}:{proxy.port}:{address_text}"])
            address_text = proxy.host
        # Without an address of the target (remote_dns), libcurl would resolve the name for socks5,
        # and the guard would not check the result.
        scheme = "socks5h" if proxy.scheme == "socks5" and not target.addresses else proxy.scheme
        opt(pycurl.PROXY, f"{scheme}://{address_text}:{proxy.port}")
        opt(pycurl.NOPROXY, "")
        if target.scheme == "https" or target.addresses[:1] != (target.host,):
            opt(pycurl.HTTPPROXYTUNNEL, 1)
        if proxy.user:
            opt(pycurl.PROXYAUTH, pycurl.HTTPAUTH_BASIC)
            opt(pycurl.PROXYUSERNAME, proxy.user)
            opt(pycurl.PROXYPASSWORD, proxy.password)


def _set_result(
    future: asyncio.Future[Response | BaseException], answer: Response | BaseException
) -> None:
    if not future.done():
        future.set_result(answer)


def _refused_by_libcurl(e: pycurl.error) -> Failure:
    return transport(*(e.args if len(e.args) == 2 else (0, str(e))))


def _response(ex: Exchange, url: str) -> Response:
    try:
        headers = ex.read_head() if ex.headers is None else ex.headers
        body = ex.take_body()
    except BrokenCoding as e:
        raise breach(Reason.CODING, str(e), status=ex.status) from None
    except TooManyCodings as e:
        raise breach(Reason.CODINGS, str(e), status=ex.status) from None
    info = ex.curl.getinfo
    # By libcurl's clock, which starts slightly after `ex.started`.
    first_byte = info(pycurl.STARTTRANSFER_TIME)
    return Response(
        url=url,
        status=ex.status,
        headers=headers,
        body=body,
        peer=ex.peer,
        seconds=info(pycurl.TOTAL_TIME),
        first_byte=first_byte,
        http_version=ex.version,
        connect=min(ex.ready_at - ex.started, first_byte),
    )


_refused = re.compile(r"CONNECT tunnel failed, response (\d+)").search
# CURLPX_REPLY_…: replies of a SOCKS server about the target, not about the proxy or this client.
_ABOUT_TARGET = range(17, 26)


def _failure(ex: Exchange, error: tuple[int, str] | None, proxied: bool) -> Failure:
    code, message = error or (0, "")
    if ex.failure is None:
        ex.failure = ex.oversized()
    if proxied and ex.failure is None:
        if m := _refused(message):
            kind = ErrorClass.BLOCKED if m[1] in ("401", "403", "407") else ErrorClass.TRANSIENT
            return ProxyFailed(
                kind,
                sentence(Reason.PROXY, detail=f"it answered {m[1]}"),
                own=m[1] in ("401", "407"),
                detail=message,
            )
        if code == _E_PROXY:
            return ProxyFailed(
                LIMITS[Reason.PROXY],
                sentence(Reason.PROXY),
                own=ex.curl.getinfo(pycurl.PROXY_ERROR) not in _ABOUT_TARGET,
                detail=message,
            )
        if (
            code in (pycurl.E_COULDNT_RESOLVE_PROXY, pycurl.E_COULDNT_CONNECT)
            or "CONNECT aborted" in message
        ):
            return ProxyFailed(
                LIMITS[Reason.PROXY], sentence(Reason.PROXY), own=True, detail=message
            )
    if ex.failure is not None:
        if (
            proxied
            and ex.failure.kind is ErrorClass.TRANSIENT
            and not ex.ready_at
            and not ex.curl.getinfo(pycurl.CONNECT_TIME)
        ):
            return ProxyFailed(
                ex.failure.kind,
                sentence(Reason.PROXY, detail=ex.failure.reason),
                own=True,
                detail=ex.failure.detail,
            )
        return ex.failure
    return transport(code, message)
