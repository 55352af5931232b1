"""What would change: rendered connectors beside those of a worker, each checked by the worker or,
without its plugin, by the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.connect.catalogue import MARK, Problem, check, unknown
from penstock.connect.options import shown
from penstock.connect.render import Connector
from penstock.connect.rest import Known, Worker
from penstock.errors import UsageError

Action = Literal["create", "change", "keep", "delete", "foreign"]
NOT_CHECKED = "not checked by the worker: plugin not installed"


@dataclass(frozen=True, slots=True)
class Difference:
    option: str
    old: str | None  # as it may be shown
    new: str | None


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    action: Action
    connector: Connector | None  # None: the worker has it, the pipeline does not
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
            "problems": [{"option": p.option, "says": p.says} for p in self.problems],
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
    """The pipeline whose connector this is; None: nobody's of ours."""
    return known.info.config.get(MARK)


def make_plan(pipeline: str, connectors: Sequence[Connector], worker: Worker) -> Plan:
    """Asks the worker, changes nothing."""
    plugins, known = worker.plugins(), worker.connectors()
    steps = [
        _step(c, known.get(c.name), worker, installed=c.plugin.cls in plugins) for c in connectors
    ]
    rendered = {c.name for c in connectors}
    for name, there in sorted(known.items()):
        if name not in rendered and owner(there) == pipeline:
            steps.append(Step(name, "delete", None, notes=("the pipeline declares it no more",)))
    return Plan(pipeline, worker.shown, tuple(steps))


def _step(connector: Connector, there: Known | None, worker: Worker, *, installed: bool) -> Step:
    secrets, notes = connector.plugin.secrets, []
    if installed:
        said = worker.validate(connector.plugin.cls, connector.config)
        secrets = secrets | said.secrets()
        problems = [Problem(option, _sentence(text, connector)) for option, text in said.errors()]
        problems += unknown(
            connector.config, said.names() | connector.plugin.options, connector.plugin.prefixes
        )
    else:
        problems = check(connector.plugin, connector.config)
        notes.append(
            f"{NOT_CHECKED}; checked against the documentation of {connector.plugin.title} {connector.plugin.version}"
        )
    if clear := connector.clear_secrets():
        notes.append(
            f"{', '.join(clear)} would be kept by the worker as it is: ${{env:NAME}} or ${{file:PATH:KEY}} has the worker read it itself"
        )
    if there is None:
        action: Action = "create"
        differences = tuple(
            Difference(name, None, shown(name, value, secrets))
            for name, value in connector.config.items()
        )
    elif (by := owner(there)) != connector.config[MARK]:
        whose = f"pipeline {by!r}" if by else "somebody else"
        problem = Problem(
            "name",
            f"the worker has a connector of this name that belongs to {whose}; give ours another: connect.name",
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


def _sentence(text: str, connector: Connector) -> str:
    """A connector's own words may repeat what it was given."""
    said = " ".join(text.split())
    for option in connector.clear_secrets():
        said = said.replace(connector.config[option], "***")
    return said


def ours(known: Mapping[str, Known], pipeline: str | None) -> dict[str, Known]:
    """The connectors of a pipeline, or without one of every pipeline."""
    return {
        name: k
        for name, k in sorted(known.items())
        if (by := owner(k)) is not None and pipeline in (None, by)
    }


def one_of_ours(known: Mapping[str, Known], name: str, pipeline: str | None) -> Known:
    """Raises UsageError: what Penstock did not make, it neither restarts nor deletes."""
    if name not in known:
        listed = ", ".join(ours(known, pipeline)) or "none of ours"
        raise UsageError(f"the worker has no connector {name!r}", hint=f"it has {listed}")
    by = owner(known[name])
    if by is None or (pipeline is not None and by != pipeline):
        raise UsageError(
            f"connector {name} belongs to {f'pipeline {by!r}' if by else 'somebody else'}",
            hint="penstock connect status lists ours",
        )
    return known[name]
