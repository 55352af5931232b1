"""The plan of changes: rendered connectors, compared with those of a Connect worker.

The Connect worker checks each connector. Without the plugin, the documentation is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.connect.catalogue import OWNER_OPTION, Problem, check, unknown
from penstock.connect.options import shown
from penstock.connect.render import Connector
from penstock.connect.rest import Known, Worker
from penstock.errors import UsageError

Action = Literal["create", "change", "keep", "delete", "foreign"]
NOT_CHECKED = "not checked by the Connect worker: plugin not installed"


@dataclass(frozen=True, slots=True)
class Difference:
    option: str
    old: str | None  # both values with secrets masked, or None if absent
    new: str | None


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    action: Action
    connector: Connector | None  # None if only the Connect worker has it
    differences: tuple[Difference, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    installed: bool = True

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "action": self.action,
            "kind": self.connector.kind.name if self.connector else None,
            "class": self.connector.plugin.cls if self.connector else None,
            "checked_by": "worker" if self.installed else "documentation",
            "differences": [
                {"option": d.option, "old": d.old, "new": d.new} for d in self.differences
            ],
            "problems": [{"option": p.option, "says": p.message} for p in self.problems],
            "notes": list(self.notes),
            "config": self.connector.shown() if self.connector else None,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    pipeline: str
    worker: str
    steps: tuple[Step, ...] = field(default_factory=tuple)

    @property
    def changes(self) -> list[Step]:
        return [s for s in self.steps if s.action in ("create", "change", "delete")]

    @property
    def problems(self) -> list[Step]:
        return [s for s in self.steps if s.problems]


def owner(known: Known) -> str | None:
    """Return the pipeline that owns the connector, or None if Penstock did not create it."""
    return known.info.config.get(OWNER_OPTION)


def make_plan(pipeline: str, connectors: Sequence[Connector], worker: Worker) -> Plan:
    """Compare the connectors with those of the Connect worker, without changes to it."""
    plugins, known = worker.plugins(), worker.connectors()
    steps = [
        _step(c, known.get(c.name), worker, installed=c.plugin.cls in plugins) for c in connectors
    ]
    rendered = {c.name for c in connectors}
    for name, there in sorted(known.items()):
        if name not in rendered and owner(there) == pipeline:
            steps.append(Step(name, "delete", None, notes=("the pipeline no longer declares it",)))
    return Plan(pipeline, worker.shown, tuple(steps))


def _step(connector: Connector, there: Known | None, worker: Worker, *, installed: bool) -> Step:
    secrets, notes = connector.plugin.secrets, []
    if installed:
        result = worker.validate(connector.plugin.cls, connector.config)
        secrets = secrets | result.secrets()
        problems = [
            Problem(option, _masked_error(text, connector)) for option, text in result.errors()
        ]
        problems += unknown(
            connector.config, result.names() | connector.plugin.options, connector.plugin.prefixes
        )
    else:
        problems = check(connector.plugin, connector.config)
        notes.append(
            f"{NOT_CHECKED}, checked against the documentation of "
            f"{connector.plugin.title} {connector.plugin.version}"
        )
    if clear := connector.clear_secrets():
        notes.append(
            f"{', '.join(clear)} would be stored by the Connect worker in clear text: "
            "with ${env:NAME} or ${file:PATH:KEY} the Connect worker reads the value itself"
        )
    if there is None:
        action: Action = "create"
        differences = tuple(
            Difference(name, None, shown(name, value, secrets))
            for name, value in connector.config.items()
        )
    elif (by := owner(there)) != connector.config[OWNER_OPTION]:
        problem = Problem(
            "name",
            f"a connector with this name belongs to {_owner_text(by)}, "
            "so set another name: connect.name",
        )
        return Step(
            connector.name, "foreign", connector, (), (problem, *problems), tuple(notes), installed
        )
    else:
        differences = _differences(there.info.texts(), connector.config, secrets)
        action = "change" if differences else "keep"
    return Step(
        connector.name, action, connector, differences, tuple(problems), tuple(notes), installed
    )


def _differences(
    old: Mapping[str, str], new: Mapping[str, str], secrets: frozenset[str]
) -> tuple[Difference, ...]:
    found = []
    for name in [*new, *(n for n in old if n not in new)]:
        if old.get(name) != new.get(name):
            before, after = (
                shown(name, side[name], secrets) if name in side else None for side in (old, new)
            )
            found.append(Difference(name, before, after))
    return tuple(found)


def _masked_error(text: str, connector: Connector) -> str:
    """Return a connector's error on one line, with the secrets it may repeat masked."""
    result = " ".join(text.split())
    for option in connector.clear_secrets():
        result = result.replace(connector.config[option], "***")
    return result


def _owner_text(pipeline: str | None) -> str:
    return f"pipeline {pipeline!r}" if pipeline else "another program"


def owned(known: Mapping[str, Known], pipeline: str | None) -> dict[str, Known]:
    """Return the connectors of `pipeline`, or of all pipelines if it is None."""
    return {
        name: k
        for name, k in sorted(known.items())
        if (by := owner(k)) is not None and pipeline in (None, by)
    }


def find_owned(known: Mapping[str, Known], name: str, pipeline: str | None) -> Known:
    """Return one connector. Raise UsageError if Penstock did not create it for `pipeline`.

    Other connectors are never restarted or deleted.
    """
    if name not in known:
        listed = ", ".join(owned(known, pipeline)) or "no connector of a pipeline"
        raise UsageError(f"the Connect worker has no connector {name!r}", hint=f"it has {listed}")
    by = owner(known[name])
    if by is None or (pipeline is not None and by != pipeline):
        raise UsageError(
            f"connector {name} belongs to {_owner_text(by)}",
            hint="`penstock connect status` lists the connectors of pipelines",
        )
    return known[name]
