"""Records as Kafka messages that JDBC sinks of Kafka Connect can upsert: JSON with a schema.

The types in the schema never change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.ports import Row
from penstock.sinks.common import (
    MAX_COLUMNS,
    PREFIX,
    PROVENANCE_COLUMNS,
    REST,
    Flat,
    flatten,
    json_text,
)

TYPES = ("string", "double", "int64", "boolean")
KEY = PREFIX + "key"  # key field if no field was chosen
_PROVENANCE = dict.fromkeys(PROVENANCE_COLUMNS, "string") | {PREFIX + "version": "int64"}
_MAX_EXACT = 1 << 53  # above this, a double rounds a whole number
_encode = msgspec.json.Encoder().encode


class Shape:
    """The fields of one topic with their types.

    They are learned from the records, row by row. So the same rows lead to the same types again
    after a crash.

    The first value decides the type, because a connector makes a column of it and does not change
    the column later. Whole numbers are `double` too, since a price of 10 may be followed by 9.99,
    unless `types` has another type. A value that does not fit is kept in `_penstock_rest`.
    """

    def __init__(
        self,
        keys: Sequence[str] = (),
        types: Mapping[str, str] | None = None,
        *,
        provenance: bool = False,
    ) -> None:
        self.keys = tuple(keys)
        self.types = dict(types or {})
        self.provenance = provenance
        self.fields: dict[str, str] = {}
        self.notice = ""
        names = self.keys or (KEY,)
        self._key_schema = _schema(dict.fromkeys(names, "string"), optional=False)
        self._value_schema = b""
        self.restore({})

    def restore(self, fields: Mapping[str, str]) -> None:
        """Restore the recorded types. Types from the options take precedence."""
        fixed = {
            **self.types,
            **dict.fromkeys(self.keys, "string"),
            **(_PROVENANCE if self.provenance else {}),
        }
        self.fields = {**{name: kind for name, kind in fields.items() if kind in TYPES}, **fixed}
        self._value_schema = b""

    def message(self, row: Row, *, schemas: bool) -> tuple[bytes, bytes | None, Mapping[str, Any]]:
        """Return (key, value, provenance by column). The value is None for a removed record."""
        flat = flatten(row.body)
        key = self._key(row, flat)
        if not schemas:
            plain = _encode(key) if self.keys else row.key.encode("utf-8", "surrogatepass")
            return (
                plain,
                None
                if flat.deleted
                else row.body
                if self.provenance
                else _encode(flat.fields | flat.rest),
                flat.provenance,
            )
        framed = b'{"schema":%s,"payload":%s}' % (
            self._key_schema,
            _encode({name: _replace_nul(text) for name, text in key.items()}),
        )
        return framed, None if flat.deleted else self._value(flat, key), flat.provenance

    def _key(self, row: Row, flat: Flat) -> dict[str, str]:
        """Return the key fields, always as text: `5` and "5" are the key of the same record."""
        if not self.keys:
            return {KEY: row.key}
        found = {}
        for name in self.keys:
            value = flat.fields.get(name)
            if value is None or isinstance(value, dict | list) or not str(value).strip():
                self.notice = (
                    f"some records have no usable field {name!r} for their key: "
                    "the record key is used instead"
                )
                value = row.key
            found[name] = str(value)
        return found

    def _value(self, flat: Flat, key: Mapping[str, str]) -> bytes:
        payload: dict[str, Any] = {}
        rest = dict(flat.rest)
        given = {**flat.fields, **key} if self.keys else flat.fields
        for name, value in given.items():
            if value is None:
                continue
            kind = self.fields.get(name) or self._learn_type(name, value)
            if kind is None or not _fits(value, kind):
                rest[name] = value
                self.notice = (
                    "some values do not have the type of their field's first value "
                    "(or there are too many fields) and are kept as JSON in " + REST
                )
            else:
                payload[name] = _convert(value, kind)
        if self.provenance:
            payload |= {
                name: value
                for name, value in flat.provenance.items()
                if value is not None and _fits(value, _PROVENANCE[name])
            }
        if rest:
            self._learn_type(REST, "")
            payload[REST] = _replace_nul(json_text(rest))
        if not self._value_schema:
            self._value_schema = _schema(self.fields, optional=True)
        # Fields that this record does not have are null. Otherwise a sink would keep an older
        # value in the column.
        return b'{"schema":%s,"payload":%s}' % (
            self._value_schema,
            _encode({name: payload.get(name) for name in self.fields}),
        )

    def _learn_type(self, name: str, value: Any) -> str | None:
        if name not in self.fields:
            if len(self.fields) >= MAX_COLUMNS and name != REST:
                return None
            self.fields[name] = _type(value)
            self._value_schema = b""
        return self.fields[name]


def _schema(fields: Mapping[str, str], *, optional: bool) -> bytes:
    listed = [{"field": name, "type": kind, "optional": optional} for name, kind in fields.items()]
    return _encode({"type": "struct", "fields": listed, "optional": False})


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return (
            "double"
            if abs(value) <= _MAX_EXACT
            else "int64"
            if -(1 << 63) <= value < 1 << 63
            else "string"
        )
    return "double" if isinstance(value, float) else "string"


def _fits(value: Any, kind: str) -> bool:
    match kind:
        case "string":
            return True
        case "boolean":
            return isinstance(value, bool)
        case "double":
            return isinstance(value, float) or (
                isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_EXACT
            )
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return whole and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63


def _convert(value: Any, kind: str) -> Any:
    match kind:
        case "string":
            return _replace_nul(value if isinstance(value, str) else json_text(value))
        case "double":
            return float(value)
        case "int64":
            return int(value)
    return value


def _replace_nul(text: str) -> str:
    # PostgreSQL text cannot hold NUL, and one such row would stop the connector.
    return text.replace("\0", "\ufffd")
