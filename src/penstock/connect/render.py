"""Renders the connectors of a pipeline: names, owner and options.

Checks everything that needs no Connect worker, and sends no request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from penstock.authoring.pipeline import Pipeline
from penstock.config.options import suggest
from penstock.connect.catalogue import OWNER_OPTION, Plugin
from penstock.connect.connectors import KINDS, Kind, Target
from penstock.connect.options import ConnectOptions, is_secret, shown
from penstock.errors import ConfigError
from penstock.rules.masking import mask


@dataclass(frozen=True, slots=True)
class Connector:
    name: str
    kind: Kind
    where: str  # names the declaration in messages
    config: dict[str, str]

    @property
    def plugin(self) -> Plugin:
        return self.kind.plugin

    def shown(self) -> dict[str, str]:
        return {
            name: shown(name, value, self.plugin.secrets) for name, value in self.config.items()
        }

    def clear_secrets(self) -> list[str]:
        """Return the options that contain a secret in clear text instead of a reference."""
        return [
            name
            for name, value in self.config.items()
            if is_secret(name, value, self.plugin.secrets)
        ]


def render(pipeline: Pipeline, environment: Mapping[str, str] | None = None) -> list[Connector]:
    """Return all connectors of a pipeline, in the order of declaration.

    Raise ConfigError with the name of the declaration.
    """
    found: list[Connector] = []
    declared = [("source", s.url, s.options, s.connect) for s in pipeline.sources] + [
        ("sink", s.url, s.options, s.connect) for s in pipeline.sinks
    ]
    for side, url, options, given in declared:
        if given is None:
            continue
        made = rendered(pipeline.name, side, url, options, given, environment)
        if same := next((c for c in found if c.name == made.name), None):
            raise ConfigError(
                f"{made.where} and {same.where}: both connectors have the name {made.name}",
                hint='set another name for one of them: "name": "…"',
            )
        found.append(made)
    return found


def rendered(
    pipeline: str,
    side: str,
    url: str,
    options: Mapping[str, Any],
    given: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> Connector:
    where = f"{side} {mask(url.partition('?')[0])!r}"
    kind = _kind(where, side, given)
    table = ConnectOptions(where, given, environment)
    parts = urlsplit(url)
    topic = unquote(parts.path.strip("/"))
    if not topic or "/" in topic or "," in topic:
        raise ConfigError(
            f"{where}: a connector needs one topic", hint="kafka://127.0.0.1:9092/products"
        )
    own = table.text("name", kind.subject(table, topic))
    name = f"{pipeline}-{re.sub(r'[^A-Za-z0-9.]+', '-', own).strip('-').lower()}"
    keys = options.get("key") or ",".join(parse_qs(parts.query).get("key", []))
    key = tuple(
        k.strip() for k in (keys.split(",") if isinstance(keys, str) else keys) if k.strip()
    )
    schemas = options.get("schemas", parse_qs(parts.query).get("schemas", ["true"])[-1])
    if side == "sink" and str(schemas).strip().lower() in ("false", "no", "off", "0"):
        raise ConfigError(
            f"{where}: connectors cannot read the topic without schemas",
            hint="remove `schemas`: the default is true",
        )
    config = kind.build(table, Target(pipeline, name, topic, key))
    more = table.pairs("config")  # options that the user sets by their full name
    table.done()
    if taken := next(
        (option for option in ("name", "connector.class", OWNER_OPTION) if option in more), None
    ):
        raise table.wrong(
            f"config.{taken}",
            "cannot be set",
            "Penstock derives it from the pipeline, the kind and `name`",
        )
    return Connector(
        name,
        kind,
        where,
        {
            "name": name,
            "connector.class": kind.plugin.cls,
            OWNER_OPTION: pipeline,
            **config,
            **more,
        },
    )


def _kind(where: str, side: str, given: Mapping[str, Any]) -> Kind:
    name = str(given.get("kind"))
    known = [k.name for k in KINDS.values() if k.side == side]
    if name not in known:
        other = f"{name} is for a {KINDS[name].side}: " if name in KINDS else ""
        raise ConfigError(
            f"{where}: there is no kind of connector {name!r}",
            hint=other + suggest(name, known, f"one of {', '.join(known)}"),
        )
    return KINDS[name]


def template(kind: Kind) -> Connector:
    """Return the kind's example as a connector of a pipeline `shop`.

    `penstock connect init` writes it, and deploy/connect contains it.
    """
    query = "?key=sku" if kind.side == "sink" else ""
    return rendered(
        "shop",
        kind.side,
        f"kafka://kafka.example:9092/{kind.topic}{query}",
        {},
        {"kind": kind.name, **kind.example},
        {},
    )


def declaration(kind: Kind, *, toml: bool) -> list[str]:
    """Return the lines that declare the same connector in a pipeline."""
    url = f"kafka://127.0.0.1:9092/{kind.topic}" + ("?key=sku" if kind.side == "sink" else "")
    given = {"kind": kind.name, **kind.example}
    if not toml:
        return [
            f"shop.{kind.side}(",
            f'    "{url}",',
            f"    connect={msgspec.json.encode(given).decode()},",
            ")",
        ]
    lines = [f"[[{kind.side}]]", f'url = "{url}"', "", f"[{kind.side}.connect]"]
    return lines + [f"{name} = {_toml(value)}" for name, value in given.items()]


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + "}"
    # TOML and JSON write texts, numbers, lists of texts and flags in the same way.
    return msgspec.json.encode(value).decode()


def document(connector: Connector) -> dict[str, Any]:
    """Return the body of `POST /connectors`, with secrets masked."""
    return {"name": connector.name, "config": connector.shown()}
