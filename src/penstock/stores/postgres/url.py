"""A PostgreSQL URL taken apart, without its secrets where it is shown, and what a server's refusal
means in one sentence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import conninfo

from penstock.errors import ConfigError, PenstockError, Unreachable

OLDEST = 120000  # server_version_num: 12
SECRETS = ("password", "sslpassword")
EXAMPLE = "postgres://user:password@host:5432/database"
# A worker that waits for a dead peer holds up its own work; a fleet's server is near.
PATIENCE = {
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


@dataclass(frozen=True)
class Address:
    """What a URL says. `label` is for messages."""

    options: dict[str, Any]
    label: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises ConfigError."""
        try:
            found = conninfo.conninfo_to_dict(url)
            ports = str(found.get("port") or "5432").split(",")
            if not all(port.isdecimal() and 0 < int(port) < 65536 for port in ports):
                # Not shown: where a password holds a /, the half of it before that is taken for the
                # port.
                raise psycopg.ProgrammingError("what stands for its port is no port")
        except psycopg.Error as e:
            said = str(e).strip().splitlines()[0]
            secret = re.search(r"://[^@/]*:([^@/]+)@", url)
            if secret:
                said = said.replace(secret[1], "***")
            raise ConfigError(
                f"the PostgreSQL URL cannot be read: {said}",
                hint=f"it looks like {EXAMPLE}; %, @ and / in a password are written %25, %40 and %2F",
            ) from e
        if not psycopg.capabilities.has_pipeline():
            raise ConfigError(
                f"psycopg runs with libpq {psycopg.pq.version() // 10000}, and Penstock needs 14 or newer",
                hint="pip install 'psycopg[binary]'",
            )
        host = str(found.get("host") or "localhost")
        where = f"{host}:{found['port']}" if found.get("port") else host
        who = f"{found['user']}@" if found.get("user") else ""
        options = {**PATIENCE, **found}
        options.setdefault("application_name", "penstock")
        return cls(options, f"postgres://{who}{where}/{found.get('dbname') or ''}".rstrip("/"))

    def without_secrets(self, text: str) -> str:
        for name in SECRETS:
            if self.options.get(name):
                text = text.replace(str(self.options[name]), "***")
        return text


def refusal(e: psycopg.Error, address: Address, namespace: str) -> PenstockError:
    """Why the store cannot be opened. The server's FATAL messages carry no code to the client, so
    they are known by their words.
    """
    said = address.without_secrets(" ".join(str(e).split()))
    user, database = address.options.get("user") or "you", address.options.get("dbname") or ""
    label = address.label
    if e.sqlstate == "42501":
        return Unreachable(
            f"{label}: {user} may not create the tables of Penstock in schema {namespace}: {said}",
            hint=f'as an owner of the database: CREATE SCHEMA "{namespace}" AUTHORIZATION {user}, or GRANT CREATE ON DATABASE {database or "…"} TO {user}',
        )
    if (
        "password authentication failed" in said
        or "no password supplied" in said
        or "authentication failed" in said
    ):
        return Unreachable(
            f"{label} refuses the user or the password",
            hint=f"check both in the URL ({EXAMPLE}), or PGPASSWORD",
        )
    if re.search(r'database "[^"]*" does not exist', said):
        return Unreachable(
            f"{label}: there is no such database",
            hint=f"createdb {database}, or name another one in the URL",
        )
    if re.search(r'role "[^"]*" does not exist', said):
        return Unreachable(
            f"{label}: the server knows no user {user}",
            hint=f"createuser {user}, or name another one in the URL",
        )
    if "pg_hba.conf" in said:
        return Unreachable(
            f"{label} does not let us in from here: {_said(said)}",
            hint="add a line for this client to the server's pg_hba.conf, or try sslmode=require",
        )
    if "too many clients" in said or "remaining connection slots" in said or e.sqlstate == "53300":
        return Unreachable(
            f"{label} has no connection left",
            hint="raise max_connections (a worker takes up to four, and one for each sink with an outbox), or stop other clients",
        )
    if "could not translate host name" in said or "resolve host" in said:
        return Unreachable(
            f"{label}: the host's name cannot be resolved", hint="check the host in the URL"
        )
    if "server closed the connection" in said or "received invalid response" in said:
        return Unreachable(
            f"{label} hung up: {_said(said)}",
            hint="is that port PostgreSQL's, and does it want TLS (sslmode=require)?",
        )
    if e.sqlstate is not None:
        return Unreachable(
            f"cannot prepare the store {label}: {said}", hint="penstock doctor looks closer"
        )
    return Unreachable(
        f"{label} cannot be reached: {_said(said)}",
        hint="is the server up, and are host and port in the URL right?",
    )


def _said(text: str) -> str:
    """Without the library's preamble, and only what it met first."""
    found = re.search(r"(?:FATAL|failed):\s*(.*)", text)
    return (found[1] if found else text).split(" Is the server running")[0].strip() or "no answer"
