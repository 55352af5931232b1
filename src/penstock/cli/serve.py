"""`penstock serve`: runs only a pipeline's webhooks.

See `runtime.supervisor` and `runtime.process` for the run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.cli.options import DEFAULTS, Common, PipelineArgument, pipeline_file


def serve(
    file: PipelineArgument = None,
    /,
    *,
    host: Annotated[
        str | None, Parameter(help="address to listen on (else serve.host: 127.0.0.1)")
    ] = None,
    port: Annotated[str | None, Parameter(help="port (else serve.port: 8787)")] = None,
    common: Common = DEFAULTS,
) -> int:
    """Serve the pipeline's webhooks until Ctrl-C or SIGTERM.

    Their events are accepted and stored. `penstock run` in another process does the work.
    """
    common.start_logging("info")
    given = [
        f"serve.{name}={value}"
        for name, value in (("host", host), ("port", port))
        if value is not None
    ]
    config = replace(common, overrides=[*common.overrides, *given]).load().config
    from penstock.runtime.supervisor import run_command

    chosen = Path(pipeline_file(config, file, "penstock serve FILE"))
    return run_command(config, chosen, roles=frozenset({"serve"}))
