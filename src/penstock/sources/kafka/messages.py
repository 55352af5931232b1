"""Converts Kafka messages into findings: JSON, Debezium changes and CloudEvents. Does no I/O."""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from penstock.model import mint
from penstock.ports import Finding
from penstock.rules.json_limits import TooManyValues, check_values
from penstock.rules.masking import MASK, is_secret_header

FORMATS = ("auto", "json", "debezium", "cloudevents")
# Create, read (snapshot), update, delete, truncate, message.
OPERATIONS = ("c", "r", "u", "d", "t", "m")
# Fields that give the position of a change in its database's log: PostgreSQL, MySQL, SQL Server,
# Oracle, MongoDB.
_POSITION = (
    "lsn",
    "txId",
    "file",
    "pos",
    "row",
    "change_lsn",
    "commit_lsn",
    "event_serial_no",
    "scn",
    "commit_scn",
    "rs_id",
    "ssn",
    "ord",
)
# A position is unique only if all fields of one of these sets are present: MongoDB's `ord` restarts
# with every second, and MySQL's `pos` belongs to its file.
_SUFFICIENT = (("lsn",), ("file", "pos"), ("commit_lsn",), ("scn",), ("ord", "ts_ms"))
# Fields that name the database and table of a change.
_ORIGIN = ("connector", "name", "db", "schema", "table", "collection", "server_id")
# Fields that Debezium adds to unwrapped rows.
_ADDED_FIELDS = (
    "__deleted",
    "__op",
    "__lsn",
    "__source_lsn",
    "__table",
    "__source_table",
    "__ts_ms",
    "__source_ts_ms",
)
_MAX_TIME_MS = 10**14  # milliseconds, about the year 5138: a larger number is not a time
_MAX_HEADERS = 8192  # bytes of headers that are added to the payload
_decode = msgspec.json.Decoder().decode
_canonical = msgspec.json.Encoder(order="deterministic").encode


class Message(NamedTuple):
    topic: str
    partition: int
    offset: int
    at: float | None  # timestamp of the message, in epoch seconds
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class DebeziumChange(NamedTuple):
    """A Debezium change, without its envelope."""

    op: str | None  # None if the change was unwrapped and does not name its operation
    row: dict[str, Any]
    source: Mapping[str, Any]
    ts_ms: Any


class UnreadableMessage(Exception):
    """The message cannot be parsed. The text is a readable reason."""


class MessageOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a source that decide how its messages are parsed."""

    format: str = "auto"
    operations: frozenset[str] = frozenset("cru")
    tombstones: bool = False


class MessageReader(MessageOptions, frozen=True, kw_only=True):
    """Parser for the messages of a topic.

    `topic_id` is part of the ids, because a topic that was deleted and created again starts again
    at offset 0.
    """

    cluster: str = ""
    topic_id: str = ""

    def finding(self, m: Message) -> Finding | None:
        """Convert a message. Return None if it is skipped, such as an operation not configured.

        A message that cannot be parsed becomes a refused finding.
        """
        try:
            return self._parse(m)
        except UnreadableMessage as e:
            payload = {"_kafka": {**_kafka(m), "value": as_text(m.value or b"")}}
            return Finding(
                id=self._id_by_offset(m),
                cause=_cause(m),
                payload=payload,
                at=m.at,
                refused=f"message {_cause(m)}: {e}",
            )

    def _id_by_offset(self, m: Message) -> str:
        return mint("kafka", self.cluster, self.topic_id, m.topic, str(m.partition), str(m.offset))

    def _parse(self, m: Message) -> Finding | None:
        headers = {name: value or b"" for name, value in m.headers}
        if self.format in ("auto", "cloudevents") and "ce_specversion" in headers:
            return self._cloudevent(m, _binary_event(m, headers))
        if m.value is None:
            if not self.tombstones:
                return None
            key = _key(m.key)
            payload = {
                **(key if isinstance(key, dict) else {}),
                "_cdc": {"op": "d"},
                "_kafka": _kafka(m),
            }
            return Finding(id=self._id_by_offset(m), cause=_cause(m), payload=payload, at=m.at)
        value = _json(m.value)
        if self.format in ("auto", "cloudevents") and _is_event(value):
            return self._cloudevent(m, value)
        if self.format == "cloudevents":
            raise UnreadableMessage(
                "it is no CloudEvent, neither by its headers (ce_…) nor by its value"
            )
        if self.format != "json":
            change = _debezium_change(value, headers, unwrapped=self.format == "debezium")
            if change is not None:
                return self._debezium(m, change)
            if self.format == "debezium":
                raise UnreadableMessage("it is no change event of Debezium")
        value = value if isinstance(value, dict) else {"value": value}
        text = value.get("value")
        url = (
            text
            if isinstance(text, str)
            and text.startswith(("http://", "https://"))
            and len(value) == 1
            else None
        )
        return Finding(
            id=self._id_by_offset(m),
            url=url,
            cause=_cause(m),
            payload={**value, "_kafka": _kafka(m)},
            at=m.at,
        )

    def _cloudevent(self, m: Message, event: dict[str, Any]) -> Finding | None:
        source, id_ = event.get("source"), event.get("id")
        if not isinstance(source, str) or not isinstance(id_, str) or not id_:
            raise UnreadableMessage(
                "a CloudEvent has a source and an id, and this one lacks one of them"
            )
        data = event.get("data")
        if "data_base64" in event:
            try:
                data = _json(base64.b64decode(event["data_base64"], validate=True))
            except (ValueError, TypeError):
                raise UnreadableMessage("its data_base64 is not base64") from None
        change = _debezium_change(data, {}, unwrapped=False)
        payload = data if isinstance(data, dict) else {} if data is None else {"value": data}
        meta: dict[str, Any] = {}
        if change is not None:
            if not self._wanted(change.op):
                return None
            payload, meta = change.row, {"_cdc": _cdc(change)}
        attributes = {
            name: value for name, value in event.items() if name not in ("data", "data_base64")
        }
        return Finding(
            id=mint("cloudevents", source, id_),
            cause=_cause(m),
            payload={**payload, **meta, "_cloudevent": attributes, "_kafka": _kafka(m)},
            at=_time(event.get("time")) or m.at,
        )

    def _wanted(self, op: str | None) -> bool:
        return op in self.operations or (op is None and not self.operations.isdisjoint("cru"))

    def _debezium(self, m: Message, change: DebeziumChange) -> Finding | None:
        if not self._wanted(change.op):
            return None
        field = change.source.get
        if any(all(field(name) is not None for name in names) for names in _SUFFICIENT):
            position = [field(name) for name in _POSITION] + (
                [field("ts_ms")] if field("ord") is not None else []
            )
            origin = [field(name) for name in _ORIGIN]
            # Unwrapped changes name no database, so the topic stands for it.
            if field("name") is None:
                origin.append(m.topic)
            # Several rows may share a position (one INSERT of many rows, a snapshot). The row's
            # key makes their ids different.
            row = m.key if m.key is not None else _canonical(change.row)
            id_ = mint(
                "debezium",
                _canonical([origin, position, change.op]).decode(),
                hashlib.blake2b(row, digest_size=16).hexdigest(),
            )
        else:
            id_ = self._id_by_offset(m)
        ts = change.source.get("ts_ms") or change.ts_ms
        at = ts / 1000 if isinstance(ts, int | float) and 0 < ts < _MAX_TIME_MS else m.at
        return Finding(
            id=id_,
            cause=_cause(m),
            payload={**change.row, "_cdc": _cdc(change), "_kafka": _kafka(m)},
            at=at,
        )


# -- Debezium --------------------------------------------------------------------------------------


def _debezium_change(
    value: Any, headers: Mapping[str, bytes], *, unwrapped: bool
) -> DebeziumChange | None:
    """Return the Debezium change, or None if the value is not one.

    `unwrapped`: a row without any field of Debezium is also a change.
    """
    value = _without_schema(value)
    if not isinstance(value, dict):
        return None
    op = value.get("op")
    if op in OPERATIONS and ("after" in value or "before" in value or "source" in value):
        source = value.get("source")
        return DebeziumChange(
            op, _row(value, op), source if isinstance(source, dict) else {}, value.get("ts_ms")
        )
    added = {
        name: headers[name].decode("utf-8", "replace") for name in _ADDED_FIELDS if name in headers
    } | {name: value[name] for name in _ADDED_FIELDS if name in value}
    if not added and not unwrapped:
        return None
    op = added.get("__op")
    if str(added.get("__deleted", "")).lower() == "true":
        op = "d"
    row = {name: field for name, field in value.items() if not name.startswith("__")}
    extra = {
        name.removeprefix("__").removeprefix("source_"): field
        for name, field in (*value.items(), *added.items())
        if name.startswith("__")
    }
    return DebeziumChange(op if op in OPERATIONS else None, row, extra, extra.get("ts_ms"))


def _row(value: Mapping[str, Any], op: str) -> dict[str, Any]:
    row = value.get({"d": "before", "m": "message"}.get(op, "after"))
    if isinstance(row, str):  # MongoDB documents are sent as JSON text
        row = _json(row.encode())
    return row if isinstance(row, dict) else {} if row is None else {"value": row}


def _cdc(change: DebeziumChange) -> dict[str, Any]:
    source = change.source
    found = {
        "op": change.op,
        "db": source.get("db"),
        "schema": source.get("schema"),
        "table": source.get("table") or source.get("collection"),
        "lsn": source.get("lsn"),
        "tx": source.get("txId"),
        "ts_ms": source.get("ts_ms") or change.ts_ms,
        "snapshot": source.get("snapshot")
        if source.get("snapshot") not in (None, False, "false")
        else None,
    }
    return {name: value for name, value in found.items() if value is not None}


# -- CloudEvents -----------------------------------------------------------------------------------


def _is_event(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("specversion"), str)
        and "id" in value
        and "source" in value
        and "type" in value
    )


def _binary_event(m: Message, headers: Mapping[str, bytes]) -> dict[str, Any]:
    event: dict[str, Any] = {
        name[3:]: value.decode("utf-8", "replace")
        for name, value in headers.items()
        if name.startswith("ce_")
    }
    kind = headers.get("content-type", b"").decode("utf-8", "replace").lower()
    if kind:
        event["datacontenttype"] = kind
    if m.value is not None:
        media = kind.partition(";")[0].strip()
        event["data"] = (
            _json(m.value) if not media or media.endswith(("/json", "+json")) else as_text(m.value)
        )
    return event


def _time(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


# -- bytes -----------------------------------------------------------------------------------------


def _json(raw: bytes) -> Any:
    try:
        check_values(raw)
    except TooManyValues as e:
        raise UnreadableMessage(f"its JSON {e}") from None
    # The format of schema registries: a zero byte, the schema's number, and the data, which is
    # JSON for JSON Schema.
    if raw[:1] == b"\0" and len(raw) > 5:
        try:
            return _decode(raw[5:])
        except (ValueError, RecursionError):
            raise UnreadableMessage(
                "it is encoded by a schema registry (Avro or Protobuf); "
                "have the producer or the connector write JSON"
            ) from None
    try:
        return _decode(raw)
    except RecursionError:
        raise UnreadableMessage("its JSON is nested too deeply") from None
    except ValueError as e:  # also errors of msgspec and Unicode
        if raw.startswith((b"http://", b"https://")) and len(raw.split()) == 1 and raw.isascii():
            return raw.decode().strip()
        raise UnreadableMessage(f"it is no JSON: {e}" if raw else "it is empty") from None


def as_text(raw: bytes) -> str | dict[str, str]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}


def _key(raw: bytes | None) -> Any:
    """Decode a key as JSON if it is an object. Other keys stay text, such as `007`."""
    if raw is None:
        return None
    if raw[:1] == b"{":
        with contextlib.suppress(UnreadableMessage):
            return _without_schema(_json(raw))
    return as_text(raw)


def _without_schema(value: Any) -> Any:
    """Return the payload of a value that has its schema with it, and any other value unchanged."""
    has_schema = isinstance(value, dict) and value.keys() == {"schema", "payload"}
    return value["payload"] if has_schema else value


def _kafka(m: Message) -> dict[str, Any]:
    found: dict[str, Any] = {
        "topic": m.topic,
        "partition": m.partition,
        "offset": m.offset,
        "timestamp": m.at,
        "key": _key(m.key),
    }
    if (
        m.headers
        and sum(len(name) + len(value or b"") for name, value in m.headers) <= _MAX_HEADERS
    ):
        found["headers"] = {
            name: None if value is None else MASK if is_secret_header(name) else as_text(value)
            for name, value in m.headers
        }
    return found


def _cause(m: Message) -> str:
    return f"{m.topic}/{m.partition}@{m.offset}"
