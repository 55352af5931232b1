"""`penstock run`: chooses pipeline, roles and processes.

See `runtime.supervisor` and `runtime.process` for the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.cli.options import DEFAULTS, Common, PipelineArgument, pipeline_file
from penstock.errors import UsageError


def run(
    file: PipelineArgument = None,
    /,
    *,
    role: Annotated[
        list[str],
        Parameter(
            name=["--role", "--roles"],
            help="source, serve, fetch, extract, sink: with commas or repeated (else all)",
        ),
    ] = [],  # noqa: B006
    workers: Annotated[int, Parameter(help="processes, each with all the roles (1)")] = 1,
    until_idle: Annotated[
        bool,
        Parameter(
            help="stop when all accepted events have ended and are written, or when the rest waits "
            "for an operator or a route (exit 1 if an event is dead or waits)"
        ),
    ] = False,
    common: Common = DEFAULTS,
) -> int:
    """Run a pipeline until Ctrl-C or SIGTERM.

    The first signal lets work in flight finish. A second one stops the processes immediately.
    """
    common.start_logging("info")
    config = common.load().config
    from penstock.runtime.roles import ROLES

    roles = frozenset(name.strip() for part in role for name in part.split(",") if name.strip())
    if unknown := sorted(roles - set(ROLES)):
        raise UsageError(f"there is no role {unknown[0]!r}", hint=", ".join(ROLES))
    if not 1 <= workers <= 256:
        raise UsageError(f"--workers {workers} is not a number from 1 to 256", hint="--workers 4")
    from penstock.runtime.supervisor import run_command

    return run_command(
        config,
        Path(pipeline_file(config, file, "penstock run FILE")),
        roles=roles or frozenset(ROLES),
        workers=workers,
        until_idle=until_idle,
    )
