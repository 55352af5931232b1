"""`penstock doctor`: runs the checks and prints what each found and how to fix it."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from penstock.cli.hidden import hidden, learn_file
from penstock.cli.options import DEFAULTS, Common, Json
from penstock.cli.output import (
    FOLD,
    plain,
    print_json,
    say,
    show,
    status_text,
    styled,
    table,
)
from penstock.errors import DIFFERENCES, OK, UNREACHABLE, PenstockError, StoreRefused
from penstock.operate.figures import plural
from penstock.operate.findings import Finding, open_all


def doctor(
    file: Annotated[
        str | None, Parameter(help="a pipeline to load as well (else `pipeline` of penstock.toml)")
    ] = None,
    /,
    *,
    repair: Annotated[
        bool,
        Parameter(help="let only their owner use the files of the state (modes 0700 and 0600)"),
    ] = False,
    json: Json = False,
    common: Common = DEFAULTS,
) -> int:
    """Open every store, sink, source and proxy, and check the ledger and the machine.

    Without --repair the command changes nothing, except that it migrates an SQLite store of an
    older release, as every command does. Exit code 0: no check failed. 4: the store cannot be
    opened. 5: a check failed.
    """
    from penstock.operate import doctor as checks
    from penstock.operate.ownership import check_owner
    from penstock.runtime.openings import open_sandbox, pipeline_openings, server_openings
    from penstock.runtime.stores import store_facts

    loaded = common.load()
    config = loaded.config
    if chosen := file or config.pipeline:
        learn_file(chosen)
    found = [
        *checks.machine(config, store_facts, repair=repair),
        *open_all(list(server_openings(config))),
        *checks.settings(loaded, file, openings=pipeline_openings, open_sandbox=open_sandbox),
    ]
    unreachable = False
    try:
        with common.stores(config=config) as stores:
            found += checks.store(
                stores.uow,
                stores.db,
                stores.clock,
                stores.workers_directory,
                lease=config.lease,
            )
            found += check_owner(stores.uow, stores.db, chosen)
    except StoreRefused as e:
        found.append(Finding("store", "fail", e.message, e.hint, "store.version"))
    except PenstockError as e:
        unreachable = True
        found.append(Finding("store", "fail", e.message, e.hint, "store.unreachable"))
    found = [f._replace(found=hidden(f.found), fix=hidden(f.fix)) for f in found]
    failed = sum(f.result == "fail" for f in found)
    code = UNREACHABLE if unreachable else DIFFERENCES if failed else OK
    if json:
        print_json(
            {
                "ok": code == OK,
                "exit_code": code,
                "findings": [f.document for f in found if f.result != "ok"],
                "checks": [
                    {"check": f.check, "result": f.result, "found": f.found, "fix": f.fix}
                    for f in found
                ],
            }
        )
        return code
    made = table("", "check", ("found", FOLD))
    for f in found:
        made.add_row(status_text(f.result), plain(f.check), plain(f.found))
        if f.fix:
            made.add_row("", "", styled(f"→ {f.fix}", "cyan"))
    show(made)
    warned = sum(f.result == "warn" for f in found)
    say("")
    say(
        styled(
            "all is well"
            if not failed and not warned
            else f"{plural(failed, 'failure')}, {plural(warned, 'warning')}",
            "bold",
        )
    )
    return code
