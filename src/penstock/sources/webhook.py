"""`webhook:NAME`: checks requests to /hooks/NAME and converts them into findings.

See `penstock.intake.endpoint` for the HTTP server.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from penstock.authoring.pipeline import SourceSpec
from penstock.config import units
from penstock.config.options import read_option, resolve_env
from penstock.errors import ConfigError, RequestRefused, UsageError
from penstock.model import mint
from penstock.ports import Batch, Finding
from penstock.rules import signatures
from penstock.rules.expressions import Expression, Unfit
from penstock.rules.masking import mask
from penstock.rules.signatures import Claim, Forged, Headers, Shape
from penstock.sources.base import BATCH, BaseSource, SourceContext, options
from penstock.sources.webhook_bodies import MAX_ATTRIBUTE, Item, items, media

SCHEMES = ("standard", "github", "stripe", "hmac", "bearer")
TIMED_SCHEMES = ("standard", "stripe")  # schemes whose signatures expire
# Headers with the id of an event, used if the signed part of the request has no id.
ID_HEADERS = ("webhook-id", "svix-id", "x-github-delivery", "idempotency-key")
FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
MAX_BODY = 64 << 20  # bytes, the largest value of the option max_body
OPTIONS: dict[str, Any] = {
    "secret": None,
    "secrets": None,
    "signature": None,
    "tolerance": None,
    "unsigned": "",
    "id": "",
    "max_body": None,
    "max_items": BATCH,
    "rate": None,
    "burst": 0,
    "header": "",
    "algorithm": "sha256",
    "encoding": "hex",
    "prefix": "",
    "signed": "{body}",
    "timestamp": "",
}
# Options that only signature = "hmac" has.
HMAC_OPTIONS = ("header", "algorithm", "encoding", "prefix", "signed", "timestamp")


class Webhook(BaseSource):
    """Implements ports.ServedSource."""

    served = True

    def __init__(self, spec: SourceSpec, context: SourceContext) -> None:
        super().__init__(spec, context)
        given = options(spec, OPTIONS)
        hook = spec.url.removeprefix("webhook:")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", hook):
            raise ConfigError(
                f"source {spec.name}: {mask(spec.url)!r} is not the URL of a webhook",
                hint="use webhook:NAME, such as webhook:shop for /hooks/shop, "
                "and pass all other settings as options",
            )
        if spec.every is not None:
            raise ConfigError(
                f"source {spec.name}: a webhook has no `every`",
                hint="remove `every`: the sender decides when a request is sent",
            )
        self.path = f"/hooks/{hook}"
        self.max_body: int = self._option(
            given["max_body"] or "1MiB", units.sizes(1, MAX_BODY), "max_body"
        )
        self.max_items: int = self._option(
            given["max_items"], units.counts(1, 10 * BATCH), "max_items"
        )
        self.rate: float = self._option(
            500 if given["rate"] is None else given["rate"], units.RATE, "rate"
        )
        self.burst: int = self._option(
            given["burst"] or max(1, int(min(self.rate, 1e6))), units.counts(1), "burst"
        )
        self.tolerance: float = self._option(
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
                hint=f"use one of {', '.join(SCHEMES)}",
            )
        self._shape = self._hmac_shape(given)
        self._keys = [self._key(secret) for secret in secrets]
        self.local = self._local(given["unsigned"])
        self._check_retention()

    # -- options -----------------------------------------------------------------------------------

    def _wrong(self, message: str, hint: str) -> ConfigError:
        return ConfigError(f"source {self.name}: {message}", hint=hint)

    def _option(self, value: Any, kind: units.Kind, name: str) -> Any:
        return read_option(f"source {self.name}", name, value, kind)

    def _secrets(self, given: dict[str, Any]) -> list[str]:
        one, several = given["secret"], given["secrets"]
        if one is not None and several is not None:
            raise self._wrong(
                "both secret and secrets are set",
                "use secrets = [NEW, OLD] while you change the secret, otherwise secret",
            )
        texts = [] if one is None and several is None else [one] if several is None else several
        if (
            not isinstance(texts, list | tuple)
            or not all(isinstance(text, str) for text in texts)
            or (several is not None and not texts)
        ):
            raise self._wrong(
                "a secret is not a text",
                'use secret = "env:SHOP_SECRET", or secrets = ["env:NEW", "env:OLD"]',
            )
        return [resolve_env(f"source {self.name}: its secret", text) for text in texts]

    def _key(self, secret: str) -> bytes:
        """Return the key of a secret. Errors contain only the length of the secret."""
        raw = secret.encode("utf-8", "surrogateescape")
        if self.signed == "standard" and secret.startswith("whsec_"):
            try:
                raw = signatures.canonical_base64(secret.removeprefix("whsec_"))
            except Forged:
                raise self._wrong(
                    "the part of its secret after whsec_ is not base64",
                    "copy the whole secret, or create one: printf whsec_; openssl rand -base64 32",
                ) from None
        if len(raw) < signatures.SHORTEST_SECRET:
            raise self._wrong(
                f"its secret has {len(raw)} bytes, of at least {signatures.SHORTEST_SECRET}",
                "create a random secret: printf whsec_; openssl rand -base64 32",
            )
        return raw

    def _hmac_shape(self, given: dict[str, Any]) -> Shape | None:
        if self.signed != "hmac":
            if misplaced := [name for name in HMAC_OPTIONS if name in self.spec.options]:
                raise self._wrong(
                    f'{misplaced[0]} belongs to signature = "hmac"',
                    'remove it, or set signature = "hmac"',
                )
            return None
        headers = (("header", given["header"]), ("timestamp", given["timestamp"]))
        for option, name in headers:
            if not re.fullmatch(r"[A-Za-z0-9-]{1,100}", name) and (name or option == "header"):
                raise self._wrong(
                    f"{option} {name!r} is not a header name", 'for example header = "X-Signature"'
                )
        if given["algorithm"] not in signatures.DIGESTS or given["encoding"] not in (
            "hex",
            "base64",
        ):
            raise self._wrong(
                "its algorithm or encoding is not known",
                f"use algorithm {', '.join(signatures.DIGESTS)}, and encoding hex or base64",
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
                f"signed = {shape.signed!r} does not have the body or the timestamp",
                'for example signed = "{X-Timestamp}.{body}"',
            )
        return shape

    def _local(self, unsigned: str) -> bool:
        if self.signed and not self._keys:
            raise self._wrong(
                f"signature {self.signed!r} needs a secret", 'set secret = "env:SHOP_SECRET"'
            )
        if unsigned not in ("", "loopback", "anywhere") or (unsigned and self.signed):
            raise self._wrong(
                f"unsigned is {unsigned!r}" + (", and there is a secret" if self.signed else ""),
                'use it only without a secret: "loopback" (default) or "anywhere"',
            )
        return not self.signed and unsigned != "anywhere"

    def _check_retention(self) -> None:
        """Check that events are kept longer than their signatures are valid.

        A captured request that is sent again is recognised only while its event is in the ledger.
        """
        keep = self.context.config.history.keep
        timed = self.signed in TIMED_SCHEMES or (self._shape is not None and self._shape.timestamp)
        if timed and keep is not None and keep < 2 * self.tolerance:
            raise self._wrong(
                f"history.keep ({units.write_duration(keep)}) deletes events "
                "while their signatures are still valid",
                f"set history.keep to at least {units.write_duration(2 * self.tolerance)}, "
                "or set a shorter tolerance",
            )

    # -- requests ----------------------------------------------------------------------------------

    def screen(self, method: str, headers: Headers, now: float) -> Claim | None:
        if method != "POST":
            raise RequestRefused(405, "a webhook accepts only POST", hint="curl -X POST")
        if self.local and not _is_local(headers):
            raise RequestRefused(
                403,
                "this webhook is unsigned, and serves this machine only",
                hint="send the request to 127.0.0.1 or localhost, or set a secret for the webhook",
            )
        media(headers)
        length = headers.get("content-length", ("0",))[0]
        if not length.isascii() or not length.isdigit():
            raise RequestRefused(
                400, "the content-length is not a number", hint="let the HTTP client set it"
            )
        if len(length) > 18 or int(length) > self.max_body:
            raise self._too_large()
        try:
            return self._claim(headers, now)
        except Forged as e:
            raise _unsigned(e) from None

    def _too_large(self) -> RequestRefused:
        return RequestRefused(
            413, f"the body is larger than {self.max_body} bytes", hint="send several requests"
        )

    def _claim(self, headers: Headers, now: float) -> Claim | None:
        """Return the signature to verify. A bearer token is verified here."""
        match self.signed:
            case "standard":
                return signatures.read_standard(headers, now, self.tolerance)
            case "github":
                return signatures.read_github(headers)
            case "stripe":
                return signatures.read_stripe(headers, now, self.tolerance)
            case "hmac":
                assert self._shape is not None
                return signatures.read_house(headers, now, self.tolerance, self._shape)
            case "bearer":
                signatures.check_bearer(self._keys, headers)
        return None

    def verify(self, claim: Claim | None, body: bytes) -> str | None:
        if len(body) > self.max_body:  # checked before the body is hashed
            raise self._too_large()
        try:
            return claim.verify(self._keys, body) if claim is not None else None
        except Forged as e:
            raise _unsigned(e) from None

    def findings(self, headers: Headers, body: bytes, signed_id: str | None) -> list[Finding]:
        found = items(headers, body, self.max_items)
        return [self._finding(item, i, signed_id, headers) for i, item in enumerate(found)]

    def _finding(self, item: Item, index: int, signed_id: str | None, headers: Headers) -> Finding:
        """Make a finding from an item.

        A signed id takes precedence over an unsigned id. Otherwise a captured request with another
        unsigned id would be a new event.
        """
        if item.id and (item.in_body or signed_id is None):
            id_parts, cause = ("event", item.source, item.id), item.id
        elif self._id is not None:
            cause = self._id_from_payload(item, index)
            id_parts = ("own", cause, "")
        else:
            cause = signed_id or _header_id(headers) or secrets.token_hex(16)
            id_parts = ("sent", cause, str(index))
        payload = item.payload
        if kind := headers.get("x-github-event"):
            payload = payload | {"_webhook": {"event": kind[0][:MAX_ATTRIBUTE]}}
        return Finding(
            id=mint("webhook", self.name, *id_parts),
            url=item.url,
            cause=cause,
            payload=payload,
            at=item.at,
        )

    def _id_from_payload(self, item: Item, index: int) -> str:
        assert self._id is not None
        try:
            value = self._id.search(item.payload)
        except Unfit:
            value = None
        if (
            not isinstance(value, str | int)
            or isinstance(value, bool)
            or not 0 < len(str(value)) <= MAX_ATTRIBUTE
        ):
            raise RequestRefused(
                422,
                f"item {index} has no id in the place that this webhook expects",
                hint="see the option `id` of the webhook",
            )
        return str(value)

    # -- as a source -------------------------------------------------------------------------------

    async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        # A webhook receives requests and is never read. The loop makes this a generator.
        nothing: tuple[Batch, ...] = ()
        for batch in nothing:
            yield batch

    async def preview(self, cursor: bytes | None, limit: int) -> Sequence[Finding]:
        raise UsageError(
            f"source {self.name} is a webhook and cannot be previewed",
            hint=f"run `penstock serve FILE` and POST to {self.path}",
        )

    def describe(self, cursor: bytes | None) -> str:
        return f"served at {self.path}, " + (
            f"signed ({self.signed})"
            if self.signed
            else "unsigned" + (", this machine only" if self.local else "")
        )


def _unsigned(e: Forged) -> RequestRefused:
    return RequestRefused(
        401,
        "the request has no valid signature or token",
        hint="check the secret of the webhook and the clocks of both machines",
        why=str(e),
    )


def _header_id(headers: Headers) -> str | None:
    for name in ID_HEADERS:
        if values := headers.get(name):
            if len(values) != 1 or not 0 < len(values[0]) <= MAX_ATTRIBUTE:
                raise RequestRefused(
                    400,
                    f"{name} is not a valid id",
                    hint=f"send one id of 1 to {MAX_ATTRIBUTE} characters",
                )
            return values[0]
    return None


# -- an unsigned webhook serves this machine, but no web page of another site in its browser -------


def _is_local(headers: Headers) -> bool:
    """Return whether a request comes from this machine, and from no foreign web page.

    The Host header must be a loopback address, which excludes DNS rebinding. The Origin header, if
    any, must be one too.
    """
    hosts, origins = headers.get("host", ()), headers.get("origin", ())
    if any(name in headers for name in FORWARDED):
        return False  # a proxy on this machine sends a local Host header for any client
    if len(hosts) != 1 or len(origins) > 1 or not _is_loopback(hosts[0]):
        return False
    if origins:
        scheme, _, origin = origins[0].partition("://")
        return scheme in ("http", "https") and _is_loopback(origin)
    return all(value in ("none", "same-origin") for value in headers.get("sec-fetch-site", ()))


def _is_loopback(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address, with or without a port."""
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


open_source = Webhook
