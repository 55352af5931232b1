"""`penstock adopt`: makes a pipeline the owner of the state directory or of the namespace."""

from __future__ import annotations

from penstock.cli.options import DEFAULTS, Common, Json, PipelineArgument, pipeline_file
from penstock.cli.output import plain, print_json, say
from penstock.operate.figures import plural


def adopt(
    file: PipelineArgument = None,
    /,
    *,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Make a pipeline the owner of the state directory, or of the namespace on a server.

    The first `penstock run` makes its pipeline the owner, and other pipelines are refused. Use this
    command after you have renamed a pipeline, or to replace it by another one. Open events of the
    old pipeline are then handled by the new one. Stop the workers of the old pipeline first.

    Exit code 3: a worker of the old pipeline is alive.
    """
    from penstock.authoring.load import load
    from penstock.operate import ownership

    config = common.load().config
    name = load(pipeline_file(config, file, "penstock adopt FILE")).name
    with common.stores(config=config) as stores:
        done = ownership.adopt(
            stores.uow, stores.db, stores.clock, pipeline=name, workers=stores.workers_directory
        )
        store = stores.db.path
    if json:
        print_json(
            {
                "store": store,
                "pipeline": name,
                "before": done.before,
                "changed": done.before != name,
                "open_events": done.events,
                "rows_waiting": done.rows,
            }
        )
        return
    if done.before == name:
        say(plain(f"{store} belongs to the pipeline {name!r} already"))
        return
    say(plain(f"{store} belongs to the pipeline {name!r} now (before: {done.before or 'none'})"))
    if done.events:
        say(f"{plural(done.events, 'open event')} will be handled by it")
    if done.rows:
        say(
            f"{plural(done.rows, 'row')} of earlier events wait for sinks. "
            "They are written if the new pipeline has the same sinks"
        )
