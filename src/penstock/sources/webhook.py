"""`webhook:NAME`: what may be told to /hooks/NAME, by whom, and which event that is. It is served,
not read; the HTTP server is penstock.intake.endpoint.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from penstock.authoring.pipeline import SourceSpec
from penstock.config import units
from penstock.errors import ConfigError, RequestRefused, UsageError
from penstock.model import mint
from penstock.ports import Batch, Finding
from penstock.rules import signatures
from penstock.rules.expressions import Expression, Unfit
from penstock.rules.masking import mask
from penstock.rules.signatures import Forged, Headers, Shape
from penstock.sources.base import BATCH, BaseSource, SourceContext, options
from penstock.sources.webhook_bodies import LONGEST, Item, items, media

SCHEMES = ("standard", "github", "stripe", "hmac", "bearer")
TIMED = ("standard", "stripe")  # their signatures end
IDS = (
    "webhook-id",
    "svix-id",
    "x-github-delivery",
    "idempotency-key",
)  # where nothing signed names the event
FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
LARGEST = 64 << 20
KNOWN: dict[str, Any] = {
    "secret": None, "secrets": None, "signature": None, "tolerance": None, "unsigned": "", "id": "",
    "max_body": None, "max_items": BATCH, "rate": None, "burst": 0,
    "header": "", "algorithm": "sha256", "encoding": "hex", "prefix": "", "signed": "{body}", "timestamp": "",
}  # fmt: skip
HOUSE = (
    "header",
    "algorithm",
    "encoding",
    "prefix",
    "signed",
    "timestamp",
)  # options of signature = "hmac" alone


def open_source(spec: SourceSpec, context: SourceContext) -> Webhook:
    return Webhook(spec, context)


class Webhook(BaseSource):
    """Implements ports.ServedSource."""

    served = True

    def __init__(self, spec: SourceSpec, context: SourceContext) -> None:
        super().__init__(spec, context)
        given = options(spec, KNOWN)
        hook = spec.url.removeprefix("webhook:")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", hook):
            raise ConfigError(
                f"source {spec.name}: {mask(spec.url)!r} names no hook",
                hint="webhook:shop is served at /hooks/shop; all else is an option",
            )
        if spec.every is not None:
            raise ConfigError(
                f"source {spec.name}: a webhook has no `every`",
                hint="it is told, not asked; leave it out",
            )
        self.path = f"/hooks/{hook}"
        self.max_body: int = self._of(
            given["max_body"] or "1MiB", units.sizes(1, LARGEST), "max_body"
        )
        self.max_items: int = self._of(given["max_items"], units.counts(1, 10 * BATCH), "max_items")
        self.rate: float = self._of(
            500 if given["rate"] is None else given["rate"], units.RATE, "rate"
        )
        self.burst: int = self._of(
            given["burst"] or max(1, int(min(self.rate, 1e6))), units.counts(1), "burst"
        )
        self.tolerance: float = self._of(
            given["tolerance"] or "5m", units.durations(1, 86400), "tolerance"
        )
        self._id = (
            Expression(given["id"], f"source {spec.name}: id", "event.id") if given["id"] else None
        )
        secrets = self._secrets(given)
        self.signed: str = (
            given["signature"] if given["signature"] is not None else "standard" if secrets else ""
        )
        if self.signed not in ("", *SCHEMES):
            raise ConfigError(
                f"source {spec.name}: signature {self.signed!r} is not known",
                hint=f"one of {', '.join(SCHEMES)}",
            )
        self._shape = self._house(given)
        self._keys = [self._key(secret) for secret in secrets]
        self.local = self._local(given["unsigned"])
        self._remembers()

    # -- options -----------------------------------------------------------------------------------

    def _wrong(self, message: str, hint: str) -> ConfigError:
        return ConfigError(f"source {self.name}: {message}", hint=hint)

    def _of(self, value: Any, kind: units.Kind, name: str) -> Any:
        try:
            return kind.read(value)
        except (ValueError, TypeError):
            raise self._wrong(f"{name} is {value!r}", f"expected {kind.expected}") from None

    def _secrets(self, given: dict[str, Any]) -> list[str]:
        one, several = given["secret"], given["secrets"]
        if one is not None and several is not None:
            raise self._wrong(
                "there are both secret and secrets",
                "secrets = [NEW, OLD] while you change it, else secret",
            )
        texts = [] if one is None and several is None else [one] if several is None else several
        if (
            not isinstance(texts, list | tuple)
            or not all(isinstance(text, str) for text in texts)
            or (several is not None and not texts)
        ):
            raise self._wrong(
                "a secret is no text",
                'secret = "env:SHOP_SECRET", or secrets = ["env:NEW", "env:OLD"]',
            )
        found = []
        for text in texts:
            if text.startswith("env:"):
                name = text.removeprefix("env:")
                if not (value := os.environ.get(name)):
                    raise self._wrong(
                        f"its secret is in the variable {name}, which is not set",
                        f"export {name}=…",
                    )
                text = value
            found.append(text)
        return found

    def _key(self, secret: str) -> bytes:
        """Never says anything of the secret but its length."""
        raw = secret.encode("utf-8", "surrogateescape")
        if self.signed == "standard" and secret.startswith("whsec_"):
            try:
                raw = signatures.canonical_base64(secret.removeprefix("whsec_"))
            except Forged:
                raise self._wrong(
                    "what follows whsec_ in its secret is not base64",
                    "copy it whole, or make one: printf whsec_; openssl rand -base64 32",
                ) from None
        if len(raw) < signatures.SHORTEST_SECRET:
            raise self._wrong(
                f"its secret has {len(raw)} bytes, of at least {signatures.SHORTEST_SECRET}",
                "one that nobody guesses: printf whsec_; openssl rand -base64 32",
            )
        return raw

    def _house(self, given: dict[str, Any]) -> Shape | None:
        if self.signed != "hmac":
            if strange := [name for name in HOUSE if name in self.spec.options]:
                raise self._wrong(
                    f'{strange[0]} belongs to signature = "hmac"',
                    'leave it out, or set signature = "hmac"',
                )
            return None
        names = (("header", given["header"]), ("timestamp", given["timestamp"]))
        for option, name in names:
            if not re.fullmatch(r"[A-Za-z0-9-]{1,100}", name) and (name or option == "header"):
                raise self._wrong(f"{option} {name!r} is no header", 'header = "X-Signature"')
        if given["algorithm"] not in signatures.DIGESTS or given["encoding"] not in (
            "hex",
            "base64",
        ):
            raise self._wrong(
                "its algorithm or encoding is not known",
                f"algorithm: {', '.join(signatures.DIGESTS)}; encoding: hex, base64",
            )
        shape = Shape(
            given["header"].lower(),
            given["algorithm"],
            given["encoding"],
            given["prefix"],
            given["signed"],
            given["timestamp"].lower(),
        )
        if "body" not in shape.places() or (
            shape.timestamp and shape.timestamp not in shape.places()
        ):
            raise self._wrong(
                f"signed = {shape.signed!r} leaves out the body or the timestamp",
                'signed = "{X-Timestamp}.{body}"',
            )
        return shape

    def _local(self, unsigned: str) -> bool:
        if self.signed and not self._keys:
            raise self._wrong(
                f"signature {self.signed!r} needs a secret", 'secret = "env:SHOP_SECRET"'
            )
        if unsigned not in ("", "loopback", "anywhere") or (unsigned and self.signed):
            raise self._wrong(
                f"unsigned is {unsigned!r}" + (", and there is a secret" if self.signed else ""),
                'without a secret: "loopback" (default) or "anywhere"',
            )
        return not self.signed and unsigned != "anywhere"

    def _remembers(self) -> None:
        """A captured request is known as long as its event is: that must be longer than its
        signature holds.
        """
        keep = self.context.config.history.keep
        timed = self.signed in TIMED or (self._shape is not None and self._shape.timestamp)
        if timed and keep is not None and keep < 2 * self.tolerance:
            raise self._wrong(
                f"history.keep ({units.write_duration(keep)}) forgets events while their signatures still hold",
                f"history.keep of at least {units.write_duration(2 * self.tolerance)}, or a shorter tolerance",
            )

    # -- requests ----------------------------------------------------------------------------------

    def screen(self, method: str, headers: Headers) -> None:
        if method != "POST":
            raise RequestRefused(405, "a hook is told by POST", hint="curl -X POST")
        if self.local and not _from_here(headers):
            raise RequestRefused(
                403,
                "this hook is unsigned, and serves this machine only",
                hint="ask it as 127.0.0.1 or localhost, or give the hook a secret",
            )
        media(headers)
        length = headers.get("content-length", ("0",))[0]
        if not length.isascii() or not length.isdigit():
            raise RequestRefused(
                400, "the content-length is no number", hint="leave it to your client"
            )
        if len(length) > 18 or int(length) > self.max_body:
            raise self._too_large()

    def _too_large(self) -> RequestRefused:
        return RequestRefused(
            413, f"the body is larger than {self.max_body} bytes", hint="send several requests"
        )

    def findings(self, method: str, headers: Headers, body: bytes, now: float) -> list[Finding]:
        self.screen(method, headers)
        if len(body) > self.max_body:  # before anything is hashed
            raise self._too_large()
        vouched = self._verify(headers, body, now)
        found = items(headers, body, self.max_items)
        return [self._finding(item, i, vouched, headers) for i, item in enumerate(found)]

    def _verify(self, headers: Headers, body: bytes, now: float) -> str | None:
        """The name of the event that the signature vouches for, if any."""
        try:
            match self.signed:
                case "standard":
                    return signatures.standard(self._keys, headers, body, now, self.tolerance)
                case "github":
                    return signatures.github(self._keys, headers, body)
                case "stripe":
                    return signatures.stripe(self._keys, headers, body, now, self.tolerance)
                case "hmac":
                    assert self._shape is not None
                    return signatures.house(
                        self._keys, headers, body, now, self.tolerance, self._shape
                    )
                case "bearer":
                    signatures.bearer(self._keys, headers)
        except Forged as e:
            raise RequestRefused(
                401,
                "this request is not from a sender that is known here",
                hint="the hook's secret, and a clock that is right",
                why=str(e),
            ) from None
        return None

    def _finding(self, item: Item, index: int, vouched: str | None, headers: Headers) -> Finding:
        """A name that no signature covers must not make a captured request a new event, so what is
        vouched for goes first.
        """
        if item.id and (item.in_body or vouched is None):
            names, cause = ("event", item.source, item.id), item.id
        elif self._id is not None:
            cause = self._own_id(item, index)
            names = ("own", cause, "")
        else:
            cause = vouched or _header_id(headers) or secrets.token_hex(16)
            names = ("sent", cause, str(index))
        payload = item.payload
        if kind := headers.get("x-github-event"):
            payload = payload | {"_webhook": {"event": kind[0][:LONGEST]}}
        return Finding(
            id=mint("webhook", self.name, *names),
            url=item.url,
            cause=cause,
            payload=payload,
            at=item.at,
        )

    def _own_id(self, item: Item, index: int) -> str:
        assert self._id is not None
        try:
            value = self._id.search(item.payload)
        except Unfit:
            value = None
        if (
            not isinstance(value, str | int)
            or isinstance(value, bool)
            or not 0 < len(str(value)) <= LONGEST
        ):
            raise RequestRefused(
                422,
                f"item {index} has no id where this hook looks for it",
                hint="the hook's option `id` says where",
            )
        return str(value)

    # -- as a source -------------------------------------------------------------------------------

    async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        nothing: tuple[Batch, ...] = ()  # ever: it is told
        for batch in nothing:
            yield batch

    async def preview(self, cursor: bytes | None, limit: int) -> Sequence[Finding]:
        raise UsageError(
            f"source {self.name} is told, not asked: there is nothing to look at",
            hint=f"penstock serve FILE, and POST to {self.path}",
        )

    def describe(self, cursor: bytes | None) -> str:
        return f"served at {self.path}, " + (
            f"signed ({self.signed})"
            if self.signed
            else "unsigned" + (", this machine only" if self.local else "")
        )


def _header_id(headers: Headers) -> str | None:
    for name in IDS:
        if values := headers.get(name):
            if len(values) != 1 or not 0 < len(values[0]) <= LONGEST:
                raise RequestRefused(
                    400, f"{name} is no id", hint=f"one, of 1 to {LONGEST} characters"
                )
            return values[0]
    return None


# -- an unsigned hook serves this machine, and no web page in a browser on it ----------------------


def _from_here(headers: Headers) -> bool:
    """By the name it was asked under, which DNS may not have pointed here, and by the page that
    asks, which must be ours too.
    """
    hosts, origins = headers.get("host", ()), headers.get("origin", ())
    if any(name in headers for name in FORWARDED):
        return False  # through a proxy on this machine, whose Host is ours whoever asked it
    if len(hosts) != 1 or len(origins) > 1 or not _is_loopback(hosts[0]):
        return False
    if origins:
        scheme, _, origin = origins[0].partition("://")
        return scheme in ("http", "https") and _is_loopback(origin)
    return all(value in ("none", "same-origin") for value in headers.get("sec-fetch-site", ()))


def _is_loopback(host: str) -> bool:
    """Written in one of the few ways there are, with a port or without."""
    match = re.fullmatch(
        r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)|localhost)(?::[0-9]{1,5})?", host, re.ASCII
    )
    if match is None:
        return False
    try:
        address = match[1] or match[2]
        return address is None or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
