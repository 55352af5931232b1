"""Names of connections to PostgreSQL, which show the release and the store version of a client."""

from __future__ import annotations

import os
import re
import socket
import zlib

from penstock import __version__
from penstock.stores.migrations.other_workers import OtherWorker
from penstock.stores.migrations.versions import newest
from penstock.stores.sql import Tx

MAX_NAME = 63  # bytes of an application name that the server keeps
# Releases up to 0.1.0 have this name, without the namespace.
OLD_NAME = "penstock"
_NAME = re.compile(
    r"penstock (?P<release>\S+) v(?P<version>\d+) (?P<key>[0-9a-f]{8}) (?P<pid>\d+)@(?P<host>.*)"
)


def application_name(namespace: str) -> str:
    """Return the name of this process's connections, for example `penstock 0.2.0 v3 … 17@host`."""
    host = socket.gethostname().encode("ascii", "replace").decode()
    name = f"penstock {__version__} v{newest()} {_key(namespace)} {os.getpid()}@{host}"
    return name[:MAX_NAME]


def other_workers(tx: Tx, namespace: str) -> list[OtherWorker]:
    """Return the processes of other releases that are connected for this namespace.

    A connection of release 0.1.0 does not show its namespace, so it counts for all.
    """
    rows = tx.execute(
        "SELECT application_name, coalesce(host(client_addr), 'localhost'), pid"
        " FROM pg_stat_activity WHERE datname=current_database() AND pid<>pg_backend_pid()"
        " AND starts_with(application_name, ?)",
        (OLD_NAME,),
    ).fetchall()
    old: dict[str, list[str]] = {}
    for name, host, pid in sorted(rows):
        if name == OLD_NAME:
            old.setdefault(host, []).append(str(pid))
    # A worker has several connections. Their server processes are the only ids that are known.
    found = [
        OtherWorker(host=host, process=f"connections with server process id {', '.join(pids)}")
        for host, pids in old.items()
    ]
    named = [match for name in sorted({row[0] for row in rows}) if (match := _NAME.fullmatch(name))]
    return found + [
        OtherWorker(host=m["host"], process=f"pid {m['pid']}", release=m["release"])
        for m in named
        if m["key"] == _key(namespace) and int(m["version"]) != newest()
    ]


def _key(namespace: str) -> str:
    return f"{zlib.crc32(namespace.encode()):08x}"
