"""`penstock connect …`: manages the connectors of a pipeline on a Kafka Connect worker.

See `penstock.connect` for rendering and comparison.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from penstock.authoring.load import load
from penstock.cli.options import (
    DEFAULTS,
    Common,
    Json,
    PipelineArgument,
    Yes,
    confirmed,
    pipeline_file,
    read_value,
)
from penstock.cli.output import (
    FIXED,
    FOLD,
    plain,
    print_json,
    say,
    show,
    styled,
    table,
)
from penstock.connect.apply import apply as apply_plan
from penstock.connect.apply import first_lines, state_of
from penstock.connect.plan import Plan, Step, find_owned, make_plan, owned, owner
from penstock.connect.render import declaration, document, render, template
from penstock.connect.rest import Known, Status, Worker
from penstock.errors import CONFIGURATION, DIFFERENCES, OK, RAN_WITH_FAILURES, UsageError
from penstock.operate.figures import plural

app = App(
    name="connect",
    help="Kafka Connect: plan, apply and monitor the connectors of a pipeline.",
)

Url = Annotated[
    str | None,
    Parameter(
        name="--url",
        help="REST interface of the Connect worker (else connect.url, PENSTOCK_CONNECT_URL)",
    ),
]
Of = Annotated[
    str | None,
    Parameter(
        name="--pipeline",
        help="only connectors of this pipeline, by name or file (else of all pipelines)",
    ),
]
ACTIONS = {
    "create": ("+", "green"),
    "change": ("~", "yellow"),
    "delete": ("-", "red"),
    "keep": ("=", "dim"),
    "foreign": ("!", "bold red"),
}
STATES = {"RUNNING": "green", "FAILED": "bold red", "PAUSED": "yellow", "STOPPED": "yellow"}


@app.command
def init(
    kind: Annotated[
        str,
        Parameter(
            help="debezium-postgres, http-source, s3-source, jdbc-postgres, snowflake, bigquery, s3"
        ),
    ],
    /,
    *,
    toml: Annotated[bool, Parameter(help="show the declaration for a TOML pipeline")] = False,
    directory: Annotated[
        Path, Parameter(name=["--directory", "-C"], help="directory to write to (else ./connect)")
    ] = Path("connect"),
) -> None:
    """Write example options of a connector, and show its declaration in a pipeline.

    Existing files are not changed.
    """
    import msgspec

    from penstock.connect.connectors import KINDS

    if kind not in KINDS:
        raise UsageError(f"there is no kind of connector {kind!r}", hint=", ".join(KINDS))
    chosen = KINDS[kind]
    file = directory / f"{kind}.json"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with open(file, "xb") as f:
            f.write(
                msgspec.json.format(msgspec.json.encode(document(template(chosen))), indent=2)
                + b"\n"
            )
    except FileExistsError:
        raise UsageError(
            f"{file} exists already", hint="move the file, or use -C ANOTHER-DIRECTORY"
        ) from None
    say(
        styled("wrote ", "dim"),
        str(file),
        styled(f"   {chosen.plugin.title} {chosen.plugin.version}: {chosen.about}", "dim"),
    )
    say("")
    say("Declare it in the pipeline for `penstock connect plan` and `apply`:")
    say("")
    for line in declaration(chosen, toml=toml):
        say(f"  {line}")


@app.command
def plan(
    file: PipelineArgument = None,
    /,
    *,
    url: Url = None,
    json: Json = False,
    common: Common = DEFAULTS,
) -> int:
    """Show the changes that `apply` would make, and check each connector. Sends nothing.

    Exit code 5 if a connector differs, 3 if a check failed.
    """
    _, made = _planned(common, file, url)
    if json:
        print_json(
            {
                "pipeline": made.pipeline,
                "worker": made.worker,
                "connectors": [step.document() for step in made.steps],
            }
        )
    else:
        for step in made.steps:
            _show_step(step)
        say(_sum(made))
    return CONFIGURATION if made.problems else DIFFERENCES if made.changes else OK


@app.command
def apply(
    file: PipelineArgument = None,
    /,
    *,
    prune: Annotated[
        bool, Parameter(help="delete connectors that this pipeline no longer declares")
    ] = False,
    wait: Annotated[str, Parameter(help="longest wait until they run")] = "60s",
    url: Url = None,
    json: Json = False,
    common: Common = DEFAULTS,
) -> int:
    """Create and change only the connectors that differ, and wait until they run.

    Exit code 1 if a connector does not run. Its trace is shown.
    """
    from penstock.config import units

    timeout = read_value("--wait", wait, units.durations())
    worker, made = _planned(common, file, url)
    done = apply_plan(
        made, worker, prune=prune, timeout=timeout, report=(lambda text: None) if json else say
    )
    left = [step.name for step in made.steps if step.action == "delete"] if not prune else []
    if json:
        print_json(
            {
                "pipeline": made.pipeline,
                "worker": made.worker,
                "connectors": [d.document() for d in done],
                "left": left,
            }
        )
    else:
        for each in done:
            if each.action != "delete":
                _show_status(each.name, each.status)
        for name in left:
            say(styled(f"{name} is no longer declared (--prune deletes it)", "yellow"))
        sent = sum(d.action != "keep" for d in done)
        say(
            f"{plural(sent, 'connector')} sent, {plural(len(done) - sent, 'connector')} unchanged"
            if sent
            else "no connector differs, so none was sent"
        )
    return OK if all(d.ok for d in done) else RAN_WITH_FAILURES


@app.command
def status(
    *,
    pipeline: Of = None,
    all: Annotated[
        bool, Parameter(name="--all", help="also connectors that Penstock did not create")
    ] = False,
    url: Url = None,
    json: Json = False,
    common: Common = DEFAULTS,
) -> int:
    """Show connectors and tasks with their state, and the first lines of errors.

    Exit code 1 if one has failed.
    """
    worker = _worker(common, url)
    known = worker.connectors()
    found = dict(sorted(known.items())) if all else owned(known, _pipeline_name(pipeline))
    if json:
        listed = [
            {
                "name": name,
                "pipeline": owner(k),
                "class": k.info.config.get("connector.class"),
                **state_of(k.status),
            }
            for name, k in found.items()
        ]
        print_json({"worker": worker.shown, "connectors": listed})
    else:
        for name, k in found.items():
            _show_status(name, k.status)
        if not found:
            say(
                f"no connector of a pipeline on {worker.shown}"
                + (f", and {plural(len(known), 'other')}" if known else "")
            )
    return RAN_WITH_FAILURES if any(k.status.failed() for k in found.values()) else OK


@app.command
def restart(
    name: Annotated[
        str | None, Parameter(help="one connector (else all connectors of pipelines)")
    ] = None,
    /,
    *,
    failed: Annotated[bool, Parameter(help="only connectors and tasks that have failed")] = False,
    pipeline: Of = None,
    url: Url = None,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Restart connectors with their tasks, or with --failed only the failed ones.

    Positions are kept.
    """
    worker, of = _worker(common, url), _pipeline_name(pipeline)
    known = worker.connectors()
    chosen = {name: find_owned(known, name, of)} if name is not None else owned(known, of)
    if failed:
        chosen = {n: k for n, k in chosen.items() if k.status.failed()}
    for each in chosen:
        worker.restart(each, only_failed=failed)
    if json:
        print_json({"worker": worker.shown, "restarted": list(chosen)})
    else:
        for each, k in chosen.items():
            what = (
                plural(sum(t.state == "FAILED" for t in k.status.tasks), "failed task")
                if failed
                else plural(len(k.status.tasks), "task")
            )
            say(f"{each}: restarted, with {what}")
        if not chosen:
            say("no connector has failed" if failed else "no connector of a pipeline exists")


@app.command
def delete(
    name: Annotated[str | None, Parameter(help="one connector")] = None,
    /,
    *,
    all: Annotated[
        bool, Parameter(name="--all", help="all connectors of pipelines (or of --pipeline)")
    ] = False,
    yes: Yes = False,
    pipeline: Of = None,
    url: Url = None,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Delete connectors of pipelines from the Connect worker, after a confirmation.

    Topics, tables and replication slots stay. The slots are listed.
    """
    if (name is None) != all:
        raise UsageError("no connector given", hint="penstock connect delete NAME, or --all")
    worker, of = _worker(common, url), _pipeline_name(pipeline)
    known = worker.connectors()
    chosen = {name: find_owned(known, name, of)} if name is not None else owned(known, of)
    if chosen and not confirmed(f"delete {', '.join(chosen)}", yes=yes):
        say("nothing deleted")
        return
    for each in chosen:
        worker.delete(each)
    if json:
        print_json(
            {
                "worker": worker.shown,
                "deleted": list(chosen),
                "slots": [s for k in chosen.values() if (s := _slot(k))],
            }
        )
        return
    for each, k in chosen.items():
        say(f"{each}: deleted")
        if slot := _slot(k):
            say(
                styled(
                    "  its replication slot stays and keeps WAL on the server: "
                    f"SELECT pg_drop_replication_slot('{slot}')",
                    "yellow",
                )
            )
    if not chosen:
        say("no connector of a pipeline exists")


# -- helpers ---------------------------------------------------------------------------------------


def _worker(common: Common, url: str | None) -> Worker:
    return Worker(url or common.load().config.connect.url)


def _planned(common: Common, file: str | None, url: str | None) -> tuple[Worker, Plan]:
    config = common.load().config
    pipeline = load(pipeline_file(config, file, "penstock connect plan FILE"))
    connectors = render(pipeline)
    worker = Worker(url or config.connect.url)
    return worker, make_plan(pipeline.name, connectors, worker)


def _pipeline_name(given: str | None) -> str | None:
    """Return the name of a pipeline that is given by name or file."""
    if given is None or not given.endswith((".py", ".toml")):
        return given

    return load(given).name


def _slot(known: Known) -> str | None:
    return known.info.config.get("slot.name")


def _show_step(step: Step) -> None:
    sign, style = ACTIONS[step.action]
    about = f"   {step.connector.kind.name}, for {step.connector.where}" if step.connector else ""
    say(styled(f"{sign} {step.name}", style), styled(about, "dim"))
    for d in step.differences:
        change = (
            f"{d.new}" if d.old is None else "(removed)" if d.new is None else f"{d.old} → {d.new}"
        )
        say(f"    {d.option} = {change}")
    for note in step.notes:
        say(styled(f"    {note}", "dim"))
    for problem in step.problems:
        say(styled(f"    {problem.option}: {problem.message}", "bold red"))


def _sum(made: Plan) -> str:
    counts: dict[str, int] = {}
    for step in made.steps:
        counts[step.action] = counts.get(step.action, 0) + 1
    if not made.steps:
        return (
            f"pipeline {made.pipeline} declares no connector: "
            "add connect={…} to a kafka:// source or sink"
        )
    labels = {
        "create": "to create",
        "change": "to change",
        "delete": "to delete (apply --prune)",
        "keep": "as declared",
        "foreign": "of other owners",
    }
    listed = ", ".join(f"{n} {labels[action]}" for action, n in counts.items())
    wrong = (
        f", {plural(sum(len(s.problems) for s in made.steps), 'problem')}" if made.problems else ""
    )
    return f"{listed} on {made.worker}{wrong}"


def _show_status(name: str, status: Status) -> None:
    made = table((plain(name), FIXED), ("state", FIXED), ("worker", FOLD))
    states: list[tuple[str, Any]] = [
        ("connector", status.connector),
        *((f"task {t.id}", t) for t in status.tasks),
    ]
    for what, state in states:
        made.add_row(what, styled(state.state, STATES.get(state.state, "")), plain(state.worker_id))
    show(made)
    for what, state in states:
        for line in first_lines(state):
            say(styled(f"  {what}: {line}", "red"))
