"""From a pipeline to the connectors that feed and follow it: names, marks and options, checked for
what needs no worker. Nothing is sent.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from penstock.authoring.pipeline import Pipeline
from penstock.connect.catalogue import MARK, Plugin
from penstock.connect.connectors import KINDS, Kind, Place
from penstock.connect.options import Table, is_secret, shown
from penstock.errors import ConfigError
from penstock.rules.masking import mask


@dataclass(frozen=True, slots=True)
class Connector:
    name: str
    kind: Kind
    where: str  # the declaration it comes from, for people
    config: dict[str, str]

    @property
    def plugin(self) -> Plugin:
        return self.kind.plugin

    def shown(self) -> dict[str, str]:
        return masked(self.config, self.plugin)

    def clear_secrets(self) -> list[str]:
        """Options that hold a secret itself instead of a reference to it."""
        return [
            name
            for name, value in self.config.items()
            if is_secret(name, value, self.plugin.secrets)
        ]


def masked(config: Mapping[str, str], plugin: Plugin | None) -> dict[str, str]:
    secrets = plugin.secrets if plugin is not None else frozenset()
    return {name: shown(name, value, secrets) for name, value in config.items()}


def render(pipeline: Pipeline, environment: Mapping[str, str] | None = None) -> list[Connector]:
    """Every connector of a pipeline, in the order of declaration. Raises ConfigError that names the
    declaration.
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
                f"{made.where} and {same.where}: both connectors are called {made.name}",
                hint='give one a name of its own: "name": "…"',
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
    table = Table(where, given, environment)
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
    if side == "sink" and _said(
        options.get("schemas", parse_qs(parts.query).get("schemas", ["true"])[-1])
    ) in ("false", "no", "off", "0"):
        raise ConfigError(
            f"{where}: a connector cannot read it without schemas",
            hint="leave schemas out: true is the default",
        )
    config = kind.build(table, Place(pipeline, name, topic, key))
    more = table.pairs("config")  # last word: what the user writes out in full
    table.done()
    if taken := next(
        (option for option in ("name", "connector.class", MARK) if option in more), None
    ):
        raise table.wrong(
            f"config.{taken}",
            "is not yours to set",
            "it follows from the pipeline, the kind and `name`",
        )
    return Connector(
        name,
        kind,
        where,
        {"name": name, "connector.class": kind.plugin.cls, MARK: pipeline, **config, **more},
    )


def _said(value: object) -> str:
    return str(value).strip().lower()


def _kind(where: str, side: str, given: Mapping[str, Any]) -> Kind:
    name = str(given.get("kind"))
    known = [k.name for k in KINDS.values() if k.side == side]
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        other = f"{name} is for a {KINDS[name].side}; " if name in KINDS else ""
        raise ConfigError(
            f"{where}: there is no kind of connector {name!r}",
            hint=other + (f"did you mean {near[0]}?" if near else "one of " + ", ".join(known)),
        )
    return KINDS[name]


def template(kind: Kind) -> Connector:
    """The kind's example as a connector of a pipeline `shop`: what `init` writes and deploy/connect
    holds.
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
    """The same as a pipeline declares it, line by line."""
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
    return msgspec.json.encode(
        value
    ).decode()  # texts, numbers, lists of texts and flags are written alike


def document(connector: Connector) -> dict[str, Any]:
    """As `POST /connectors` takes it, secrets masked."""
    return {"name": connector.name, "config": connector.shown()}
