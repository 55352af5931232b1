"""The one HTTP client of the product: guard, pinned address, proxy, one exchange. Redirects, robots
and pace are not here.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

import certifi
import msgspec
import pycurl

from penstock.model import ErrorClass, Failure
from penstock.net.body_budget import Bodies
from penstock.net.decoding import ACCEPT_ENCODING, BrokenCoding, TooManyCodings
from penstock.net.guard import Guard, Target
from penstock.net.transfer import Engine, Exchange, HttpOptions, SetUp, nobody
from penstock.ports import Done, Response
from penstock.rules.identity import BadUrl, authority, canonical_url
from penstock.rules.proxies import ProxyFailed
from penstock.rules.verdict import Breach, breach, transport

__all__ = ["CurlFetcher", "HttpOptions", "parse_proxy"]

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
# Set by the connection or by us; a value from outside could split the message or turn it elsewhere.
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
_ADDRESSES = 3  # of one name, tried in turn where nobody listens
_E_PROXY = 97  # CURLE_PROXY, which pycurl does not name
_NO_PIN = ("",)  # a literal address is its own
_ENGINES = 64  # proxies with a warm connection pool
# seconds a checked target serves further requests; the guard itself keeps its answers longer
_FRESH = 1.0


# -- proxies ---------------------------------------------------------------------------------------


class _Proxy(msgspec.Struct, frozen=True):
    scheme: str
    host: str
    port: int
    user: str
    password: str


def parse_proxy(dsn: str) -> _Proxy:
    """`http|https|socks5|socks5h://[user:password@]host:port`. Raises Failure, without the DSN: it
    holds a password.
    """
    try:
        parts = urlsplit(dsn)
        port = parts.port
    except ValueError:
        raise breach(Breach.BAD_PROXY, "its URL cannot be read") from None
    if parts.scheme not in ("http", "https", "socks5", "socks5h"):
        raise breach(Breach.BAD_PROXY, "its scheme is not http, https, socks5 or socks5h")
    if not parts.hostname or not port:
        raise breach(Breach.BAD_PROXY, "its URL has no host or no port")
    return _Proxy(
        parts.scheme,
        parts.hostname,
        port,
        unquote(parts.username or ""),
        unquote(parts.password or ""),
    )


class _Via(msgspec.Struct, frozen=True):
    proxy: _Proxy
    target: Target


# -- the fetcher -----------------------------------------------------------------------------------


def _ca_file(options: HttpOptions) -> str:
    """libcurl's wheel does not know where this system keeps its certificate authorities."""
    paths = ssl.get_default_verify_paths()
    for path in (
        options.ca_file,
        paths.cafile,
        "/etc/ssl/certs/ca-certificates.crt",
        "/etc/pki/tls/certs/ca-bundle.crt",
        "/etc/ssl/cert.pem",
    ):
        if path and Path(path).is_file():
            return path
    return certifi.where()


class CurlFetcher:
    """ports.Fetcher. Opens on first use, in the loop that uses it; `close` ends what is under way."""

    def __init__(self, guard: Guard, options: HttpOptions | None = None) -> None:
        self.guard, self.options = guard, options or HttpOptions()
        self._opened: tuple[SetUp, Engine] | None = None
        self._proxied: OrderedDict[str, Engine] = OrderedDict()
        self._free: list[Exchange] = []
        self._preferred: dict[str, str] = {}
        self._targets: dict[str, tuple[float, Target]] = {}
        self._closed = False

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
            raise breach(Breach.BAD_URL, e.reason) from None
        self._check_open()
        set_up, engine = self._opened or self._open()
        via: _Via | None = None
        if proxy is None:
            known = self._targets.get(url[: url.index("/", 8)])
            target = (
                known[1]
                if known is not None and known[0] > set_up.now()
                else await self._resolve(url, set_up)
            )
        else:
            via, target, engine = await self._through(proxy, url)
        self._check_open()  # again: we may have waited for an address
        answer: asyncio.Future[Response | BaseException] = (
            asyncio.get_running_loop().create_future()
        )
        done = partial(_settle, answer)
        ex = self._send(
            engine, url, target, done, method=method, headers=headers, body=body, via=via
        )
        try:
            response = await answer
        except asyncio.CancelledError:
            if ex.done is done:  # else it has ended, and may be another's by now
                ex.cancel()
            raise
        if isinstance(response, Response):
            return response
        raise response

    def begin(self, url: str, headers: Mapping[str, str], done: Done) -> Exchange | None:
        """ports.DirectFetcher."""
        if self._opened is None or self._closed:
            return None
        set_up, engine = self._opened
        # The text before the path is that of an origin which the guard has checked, so the URL
        # speaks to nobody else.
        known = self._targets.get(url[: url.find("/", 8)])
        if known is None or known[0] <= set_up.now():
            return None
        try:
            return self._send(engine, url, known[1], done, headers=headers)
        except Failure:
            return None  # `fetch` fails the same way, and says so

    def _send(
        self, engine: Engine, url: str, target: Target, done: Done, *, method: str = "GET", headers: Mapping[str, str] | None = None,
        body: bytes | None = None, via: _Via | None = None,
    ) -> Exchange:  # fmt: skip
        """Under way, with nothing left to wait for but the answer, which `done` gets."""
        set_up = (self._opened or self._open())[0]
        ex = self._free.pop() if self._free else Exchange(set_up)
        try:
            if headers or method != "GET" or body is not None or via is not None:
                _dress(ex, set_up, method, headers, body, via, target)
            pins = (
                _NO_PIN
                if not target.addresses or target.addresses[0] == target.host
                else self._pins(target)
            )
            ex.url, ex.pins, ex.proxied, ex.done = url, pins, via is not None, done
            ex.aim(url, target if via is None else via.target, pins[0])
            engine.start(ex, self._ended)
        except pycurl.error as e:
            self._take_back(ex)
            raise _refused_by_libcurl(e) from None
        except BaseException:
            self._take_back(ex)
            raise
        return ex

    def _ended(self, ex: Exchange, error: tuple[int, str] | None) -> None:
        answer: Response | BaseException
        try:
            if ex.cancelled:
                answer = asyncio.CancelledError()
            elif error is None and ex.failure is None:
                answer = _response(ex, ex.url)
            else:
                answer = failure = _failure(ex, error, ex.proxied)
                if (
                    len(ex.pins) > 1
                    and not ex.ready_at
                    and failure.kind is ErrorClass.TRANSIENT
                    and not self._closed
                ):
                    self._try_next(ex)
                    return
        except Failure as e:
            answer = e
        except pycurl.error as e:
            answer = _refused_by_libcurl(e)
        except Exception as e:  # whoever waits must hear of it
            answer = Failure(
                ErrorClass.OURS, f"the answer could not be read: {type(e).__name__}: {e}"
            )
        done = ex.done
        self._take_back(ex)
        done(answer)

    def _try_next(self, ex: Exchange) -> None:
        """Nobody answered there, but the name has more addresses."""
        target, engine, ex.pins = ex.target, ex.engine, ex.pins[1:]
        assert target is not None
        assert engine is not None
        ex.clear()
        self._preferred[authority(ex.url).host] = ex.pins[0]
        ex.aim(ex.url, target, ex.pins[0])
        engine.start(ex, self._ended)

    def _take_back(self, ex: Exchange) -> None:
        ex.done = nobody
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

    # -- how

    def _check_open(self) -> None:
        if self._closed:
            raise breach(Breach.CLOSED)

    def _pins(self, target: Target) -> tuple[str, ...]:
        """A name is dialled at its checked addresses, the one that answered last time first."""
        pins, good = target.addresses, self._preferred.get(target.host)
        if good is not None and good in pins:
            pins = good, *(p for p in pins if p != good)
        elif len(self._preferred) > 8192:
            self._preferred.clear()
        return pins[:_ADDRESSES]

    def _open(self) -> tuple[SetUp, Engine]:
        loop = asyncio.get_running_loop()
        headers = [f"Accept: {self.options.accept}", f"Accept-Encoding: {ACCEPT_ENCODING}"]
        bodies = Bodies(self.options.max_held_bytes, loop.time)
        self._opened = (
            SetUp(self.guard, self.options, headers, _ca_file(self.options), loop.time, bodies),
            Engine(loop, self.options),
        )
        return self._opened

    async def _resolve(self, url: str, set_up: SetUp) -> Target:
        target = await self.guard.resolve(url)
        if len(self._targets) >= 8192:
            self._targets.clear()
        self._targets[url[: url.index("/", 8)]] = set_up.now() + _FRESH, target
        return target

    async def _through(self, dsn: str, url: str) -> tuple[_Via, Target, Engine]:
        proxy = parse_proxy(dsn)
        if proxy.scheme == "socks5h" and not self.options.remote_dns:
            raise breach(
                Breach.BAD_PROXY,
                "socks5h resolves names at the proxy; use socks5, or allow it with remote_dns",
            )
        target = (
            self.guard.check_url(url) if self.options.remote_dns else await self.guard.resolve(url)
        )
        try:
            via = _Via(
                proxy, await self.guard.resolve_proxy(proxy.host, proxy.port, scheme=proxy.scheme)
            )
        except Failure as e:
            raise ProxyFailed(
                e.kind, f"the proxy's own address: {e.reason}", own=True, detail=e.detail
            ) from None
        self._check_open()
        # A pool for each DSN: libcurl would hand a tunnel made with one user name to a request with
        # another.
        engine = self._proxied.get(dsn)
        if engine is None:
            engine = self._proxied[dsn] = Engine(asyncio.get_running_loop(), self.options)
            idle = [k for k, e in self._proxied.items() if not e.active and e is not engine]
            for k in idle[: max(0, len(self._proxied) - _ENGINES)]:
                self._proxied.pop(k).close()
        else:
            self._proxied.move_to_end(dsn)
        return via, target, engine


def _dress(
    ex: Exchange,
    set_up: SetUp,
    method: str,
    headers: Mapping[str, str] | None,
    body: bytes | None,
    via: _Via | None,
    target: Target,
) -> None:
    """Everything beyond a plain GET. What is set here, `Exchange.restore` takes back."""
    opt = ex.curl.setopt
    given: dict[str, tuple[str, str | None]] = {}  # None: not even libcurl's own
    for name, value in (headers or {}).items():
        if name.lower() in _RESERVED or not _name(name) or not _value(value):
            raise breach(Breach.BAD_REQUEST, f"header {name[:40]!r}")
        given[name.lower()] = name, value
    if method != "GET" or body is not None:
        if method not in _METHODS:
            raise breach(Breach.BAD_REQUEST, f"method {method[:20]!r}")
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
            opt(pycurl.FRESH_CONNECT, 1)  # on a used connection libcurl may send it a second time
    if given:
        ex.plain_headers = False
        lines = [line for line in set_up.headers if line.partition(":")[0].lower() not in given]
        for name, sent in given.values():
            lines.append(
                f"{name}:" if sent is None else f"{name}: {sent}" if sent.strip() else f"{name};"
            )
        try:
            opt(pycurl.HTTPHEADER, [line.encode() for line in lines])
        except UnicodeEncodeError:
            raise breach(Breach.BAD_REQUEST, "a header is not text") from None
    if via is not None:
        ex.plain = False
        proxy, address = via.proxy, via.target.ip
        place = f"[{address}]" if ":" in address else address
        if proxy.scheme == "https":  # its certificate is for its name
            opt(pycurl.RESOLVE, [f"{proxy.host}:{proxy.port}:{place}"])
            place = proxy.host
        # Without an address of the target (remote_dns) libcurl would look its name up for socks5,
        # and nobody would check what it finds.
        scheme = "socks5h" if proxy.scheme == "socks5" and not target.addresses else proxy.scheme
        opt(pycurl.PROXY, f"{scheme}://{place}:{proxy.port}")
        opt(pycurl.NOPROXY, "")
        if target.scheme == "https" or target.addresses[:1] != (target.host,):
            opt(pycurl.HTTPPROXYTUNNEL, 1)
        if proxy.user:
            opt(pycurl.PROXYAUTH, pycurl.HTTPAUTH_BASIC)
            opt(pycurl.PROXYUSERNAME, proxy.user)
            opt(pycurl.PROXYPASSWORD, proxy.password)


def _settle(
    future: asyncio.Future[Response | BaseException], answer: Response | BaseException
) -> None:
    if not future.done():
        future.set_result(answer)


def _refused_by_libcurl(e: pycurl.error) -> Failure:
    code, message = e.args if len(e.args) == 2 else (0, str(e))
    return transport(code, message).failure(detail=message)


def _response(ex: Exchange, url: str) -> Response:
    try:
        headers = ex.read_head() if ex.headers is None else ex.headers
        body = ex.take_body()
    except BrokenCoding as e:
        raise breach(Breach.CODING, str(e), status=ex.status) from None
    except TooManyCodings as e:
        raise breach(Breach.CODINGS, str(e), status=ex.status) from None
    info = ex.curl.getinfo
    first_byte = info(
        pycurl.STARTTRANSFER_TIME
    )  # by libcurl's clock, which begins a moment after ours
    return Response(
        url=url, status=ex.status, headers=headers, body=body, peer=ex.peer, seconds=info(pycurl.TOTAL_TIME), first_byte=first_byte,
        http_version=ex.version, connect=min(ex.ready_at - ex.started, first_byte),
    )  # fmt: skip


_refused = re.compile(r"CONNECT tunnel failed, response (\d+)").search
_ABOUT_TARGET = range(17, 26)  # CURLPX_REPLY_…: what a SOCKS server says of the target, not of us


def _failure(ex: Exchange, error: tuple[int, str] | None, proxied: bool) -> Failure:
    code, message = error or (0, "")
    if ex.failure is None:
        ex.failure = ex.oversized()
    if proxied and ex.failure is None:
        if m := _refused(message):
            kind = ErrorClass.BLOCKED if m[1] in ("401", "403", "407") else ErrorClass.TRANSIENT
            return ProxyFailed(
                kind,
                f"{Breach.PROXY.sentence}: it answered {m[1]}",
                own=m[1] in ("401", "407"),
                detail=message,
            )
        if code == _E_PROXY:
            return ProxyFailed(
                Breach.PROXY.kind,
                Breach.PROXY.sentence,
                own=ex.curl.getinfo(pycurl.PROXY_ERROR) not in _ABOUT_TARGET,
                detail=message,
            )
        if (
            code in (pycurl.E_COULDNT_RESOLVE_PROXY, pycurl.E_COULDNT_CONNECT)
            or "CONNECT aborted" in message
        ):
            return ProxyFailed(Breach.PROXY.kind, Breach.PROXY.sentence, own=True, detail=message)
    if ex.failure is not None:
        if (
            proxied
            and ex.failure.kind is ErrorClass.TRANSIENT
            and not ex.ready_at
            and not ex.curl.getinfo(pycurl.CONNECT_TIME)
        ):
            return ProxyFailed(
                ex.failure.kind,
                f"{Breach.PROXY.sentence}: {ex.failure.reason}",
                own=True,
                detail=ex.failure.detail,
            )
        return ex.failure
    return transport(code, message).failure(detail=message)
