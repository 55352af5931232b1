"""Parsed PostgreSQL URL, without its secrets in messages, and explanations of connection errors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import conninfo

from penstock import __version__
from penstock.errors import ConfigError, PenstockError, Unreachable

OLDEST = 120000  # oldest supported server_version_num: PostgreSQL 12
SECRETS = ("password", "sslpassword")
EXAMPLE = "postgres://user:password@host:5432/database"
# Timeouts of a connection. A worker that waits for a lost server does no other work. They can be
# short, because the server of a fleet is nearby.
TIMEOUTS = {
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


@dataclass(frozen=True)
class Address:
    """Connection options of a URL. `label` is the URL without secrets, for messages."""

    options: dict[str, Any]
    label: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises ConfigError."""
        try:
            found = conninfo.conninfo_to_dict(url)
            ports = str(found.get("port") or "5432").split(",")
            if not all(port.isdecimal() and 0 < int(port) < 65536 for port in ports):
                # Do not show the value: if a password contains a /, its first part is parsed as the
                # port.
                raise psycopg.ProgrammingError("its port is not a number from 1 to 65535")
        except psycopg.Error as e:
            text = str(e).strip().splitlines()[0]
            secret = re.search(r"://[^@/]*:([^@/]+)@", url)
            if secret:
                text = text.replace(secret[1], "***")
            raise ConfigError(
                f"the PostgreSQL URL cannot be read: {text}",
                hint=f"write it as {EXAMPLE}, with %25, %40 and %2F for %, @ and / in a password",
            ) from e
        if not psycopg.capabilities.has_pipeline():
            raise ConfigError(
                f"psycopg uses libpq {psycopg.pq.version() // 10000}, "
                "and Penstock needs 14 or newer",
                hint="run: pip install 'psycopg[binary]'",
            )
        host = str(found.get("host") or "localhost")
        where = f"{host}:{found['port']}" if found.get("port") else host
        user = f"{found['user']}@" if found.get("user") else ""
        options = {**TIMEOUTS, **found}
        options.setdefault("application_name", f"penstock {__version__}")
        return cls(options, f"postgres://{user}{where}/{found.get('dbname') or ''}".rstrip("/"))

    def without_secrets(self, text: str) -> str:
        for name in SECRETS:
            if self.options.get(name):
                text = text.replace(str(self.options[name]), "***")
        return text


# SQLSTATE and text of an error -> message and hint. The client gets the server's FATAL messages
# without an SQLSTATE, so they are recognised by their text.
_EXPLANATIONS = (
    (
        r"^42501 ",
        "{label}: {user} may not create the tables of Penstock in schema {namespace}: {text}",
        'run as an owner of the database: CREATE SCHEMA "{namespace}" AUTHORIZATION {user}, '
        "or GRANT CREATE ON DATABASE {database_or} TO {user}",
    ),
    (
        r"authentication failed|no password supplied",
        "{label} refuses the user or the password",
        f"check both in the URL ({EXAMPLE}), or PGPASSWORD",
    ),
    (
        r'database "[^"]*" does not exist',
        "{label}: there is no such database",
        "run createdb {database}, or name another one in the URL",
    ),
    (
        r'role "[^"]*" does not exist',
        "{label}: the server has no user {user}",
        "run createuser {user}, or name another one in the URL",
    ),
    (
        r"pg_hba\.conf",
        "{label} does not accept connections from this machine: {reason}",
        "add a line for this client to the server's pg_hba.conf, or try sslmode=require",
    ),
    (
        r"^53300 |too many clients|remaining connection slots",
        "{label} has no free connection",
        "raise max_connections (a worker uses up to four, and one for each sink with an outbox), "
        "or stop other clients",
    ),
    (
        r"could not translate host name|resolve host",
        "{label}: the host's name cannot be resolved",
        "check the host in the URL",
    ),
    (
        r"server closed the connection|received invalid response",
        "{label} closed the connection: {reason}",
        "check that the port belongs to PostgreSQL, and whether it requires TLS (sslmode=require)",
    ),
)
_REJECTED = ("cannot prepare the store {label}: {text}", "run `penstock doctor`")
_NOT_REACHED = (
    "{label} cannot be reached: {reason}",
    "check that the server runs, and host and port in the URL",
)


def refusal(e: psycopg.Error, address: Address, namespace: str) -> PenstockError:
    """Return the error, with a hint, to raise if the store cannot be opened."""
    text = address.without_secrets(" ".join(str(e).split()))
    database = address.options.get("dbname") or ""
    facts = {
        "label": address.label,
        "text": text,
        "reason": _first_reason(text),
        "user": address.options.get("user") or "you",
        "database": database,
        "database_or": database or "…",
        "namespace": namespace,
    }
    otherwise = _NOT_REACHED if e.sqlstate is None else _REJECTED
    found = ((m, h) for p, m, h in _EXPLANATIONS if re.search(p, f"{e.sqlstate} {text}"))
    message, hint = next(found, otherwise)
    return Unreachable(message.format(**facts), hint=hint.format(**facts))


def _first_reason(text: str) -> str:
    """Return the first reason in an error text, without libpq's preamble."""
    found = re.search(r"(?:FATAL|failed):\s*(.*)", text)
    return (found[1] if found else text).split(" Is the server running")[0].strip() or "no answer"
