"""Parses the bodies of webhook requests: JSON, NDJSON and CloudEvents in their three modes."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from urllib.parse import unquote

import msgspec

from penstock.errors import RequestRefused
from penstock.rules.json_limits import TooManyValues, check_values
from penstock.rules.signatures import Headers

JSON, NDJSON = "application/json", "application/x-ndjson"
EVENT, EVENTS = "application/cloudevents+json", "application/cloudevents-batch+json"
TYPES = (JSON, NDJSON, "application/ndjson", EVENT, EVENTS)
# JSON types also have a suffix form, such as application/vnd.github+json.
KIND = re.compile(r"application/([a-z0-9][a-z0-9!#$&^_.-]*\+)?json")
MAX_ATTRIBUTE = 1024  # characters of an attribute
# Values and lines of a body, and of each mebibyte of a larger body. Bodies are parsed on the event
# loop, and this many values take about 10 ms.
MAX_VALUES = 50_000
_decode = msgspec.json.Decoder().decode


class Item(msgspec.Struct, frozen=True, kw_only=True):
    payload: dict[str, Any]
    source: str = ""  # of a CloudEvent, which is identified by source and id
    id: str = ""
    in_body: bool = False  # True if the id is in the body, so that a signed body also signs the id
    url: str | None = None
    at: float | None = None


def media(headers: Headers) -> str:
    """Return the media type of the body. Raises RequestRefused if it is not supported."""
    hint = f"content-type: {', '.join(TYPES)}"
    given = headers.get("content-type", ())
    if len(given) != 1:
        raise RequestRefused(
            415,
            "the content-type is missing" if not given else "there are several content-types",
            hint=hint,
        )
    kind, _, parameters = given[0].partition(";")
    kind = kind.strip().lower()
    if kind not in TYPES and not (KIND.fullmatch(kind) and "cloudevents" not in kind):
        raise RequestRefused(415, "this content-type is not supported", hint=hint)
    charset = re.search(r"""charset\s*=\s*["']?([^"';\s]+)""", parameters, re.I)
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        raise RequestRefused(
            415, "only UTF-8 is supported", hint="send charset=utf-8, or no charset"
        )
    if any(
        value.strip().lower() not in ("", "identity")
        for value in headers.get("content-encoding", ())
    ):
        raise RequestRefused(
            415, "compressed bodies are not supported", hint="send it without content-encoding"
        )
    return kind


def items(headers: Headers, body: bytes, limit: int) -> list[Item]:
    """Parse a body into at most `limit` items. Raises RequestRefused if any item is invalid."""
    kind = media(headers)
    max_values = MAX_VALUES * max(1, len(body) >> 20)
    try:
        check_values(body, max_values)
    except TooManyValues as e:
        raise RequestRefused(413, f"the body {e}", hint="send several requests") from None
    if not body.strip():
        raise RequestRefused(
            400, "the body is empty", hint='for example {"url": "https://example.com/p/1"}'
        )
    if kind == EVENT:
        return [_event(_json(body))]
    if kind == EVENTS:
        events = _json(body)
        if not isinstance(events, list):
            raise RequestRefused(
                400,
                "a batch of CloudEvents must be an array",
                hint=f"send a single CloudEvent as {EVENT}",
            )
        return [_event(event, f"event {i}: ") for i, event in enumerate(_limited(events, limit))]
    if "ce-specversion" in headers:
        if kind in TYPES[1:]:
            raise RequestRefused(
                415,
                "a CloudEvent in binary mode has one JSON value as its body",
                hint=f"content-type: {JSON}",
            )
        return [_binary(headers, _json(body))]
    if kind != JSON and kind in TYPES:
        if body.count(b"\n") > max_values:
            raise RequestRefused(
                413, f"the body has more than {max_values} lines", hint="send several requests"
            )
        lines = (line for line in body.split(b"\n") if line.strip())
        return [
            _plain(_json(line, f"line {i + 1}: "), f"line {i + 1}: ")
            for i, line in enumerate(_limited(lines, limit))
        ]
    value = _json(body)
    return (
        [_plain(each, f"item {i}: ") for i, each in enumerate(_limited(value, limit))]
        if isinstance(value, list)
        else [_plain(value)]
    )


def _limited(values: Any, limit: int) -> Iterator[Any]:
    for i, value in enumerate(values):
        if i == limit:
            raise RequestRefused(
                413, f"there are more than {limit} items in one body", hint="send several requests"
            )
        yield value


def _json(raw: bytes, where: str = "") -> Any:
    try:
        return _decode(raw)
    # A number with thousands of digits raises ValueError.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as e:
        problem = (
            "is nested too deeply"
            if isinstance(e, RecursionError)
            else f"is not JSON: {str(e)[:120]}"
        )
        raise RequestRefused(
            400,
            f"{where}the body {problem}",
            hint="send one JSON value in UTF-8, or one on each line as application/x-ndjson",
        ) from None


def _plain(value: Any, where: str = "") -> Item:
    if isinstance(value, str):
        return Item(payload={"url": value})
    if not isinstance(value, dict):
        raise RequestRefused(
            400,
            f"{where}it is neither an object nor a URL",
            hint='for example {"url": "https://example.com/p/1"}',
        )
    return Item(payload=value)


# -- CloudEvents 1.0 -------------------------------------------------------------------------------


def _event(value: Any, where: str = "") -> Item:
    """Parse a CloudEvent in structured mode."""
    if not isinstance(value, dict):
        raise RequestRefused(
            400,
            f"{where}a CloudEvent must be an object",
            hint='for example {"specversion": "1.0", "id": "1", "source": "/shop", '
            '"type": "changed", "data": {…}}',
        )
    attributes = {name: each for name, each in value.items() if name not in ("data", "data_base64")}
    data = value.get("data")
    if "data_base64" in value:
        raw = value["data_base64"]
        try:
            data = (
                _json(base64.b64decode(raw, validate=True), where)
                if isinstance(raw, str) and data is None
                else None
            )
        except (binascii.Error, ValueError):
            data = None
        if data is None:
            raise RequestRefused(
                400,
                f"{where}data_base64 is not base64, or data is set too",
                hint="send JSON as data",
            )
    return _cloudevent(attributes, data, where, in_body=True)


def _binary(headers: Headers, data: Any) -> Item:
    attributes: dict[str, Any] = {}
    for name, values in headers.items():
        if name.startswith("ce-"):
            if len(values) != 1:
                raise RequestRefused(
                    400, f"{name} is sent {len(values)} times", hint="send each attribute once"
                )
            attributes[name[3:]] = unquote(values[0], errors="replace")
    return _cloudevent(attributes, data, "", in_body=False)


def _cloudevent(attributes: dict[str, Any], data: Any, where: str, *, in_body: bool) -> Item:
    if attributes.get("specversion") != "1.0":
        raise RequestRefused(
            400, f"{where}it is not a CloudEvent of version 1.0", hint='set specversion "1.0"'
        )
    for name in ("id", "source", "type"):
        value = attributes.get(name)
        if not isinstance(value, str) or not 0 < len(value) <= MAX_ATTRIBUTE:
            raise RequestRefused(
                400,
                f"{where}its {name} is not a text of 1 to {MAX_ATTRIBUTE} characters",
                hint="id, source and type are required",
            )
    payload = (
        dict(data)
        if isinstance(data, dict)
        else {}
        if data is None
        else {"url" if isinstance(data, str) else "data": data}
    )
    payload["_cloudevent"] = attributes
    subject = attributes.get("subject")
    url = (
        subject
        if isinstance(subject, str)
        and re.match(r"https?://", subject, re.I)
        and payload.get("url") is None
        else None
    )
    return Item(
        payload=payload,
        source=attributes["source"],
        id=attributes["id"],
        in_body=in_body,
        url=url,
        at=_parse_time(attributes.get("time")),
    )


def _parse_time(text: Any) -> float | None:
    """Return the epoch seconds of an RFC 3339 time, or None for any other value."""
    if not isinstance(text, str) or not re.match(r"\d{4}-\d\d-\d\d[Tt ]", text):
        return None
    try:
        parsed = datetime.fromisoformat(text)
        return parsed.timestamp() if parsed.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None
