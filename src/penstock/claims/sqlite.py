"""The claims in an SQLite file; the SQL is in sql.py, the file's side in stores/sqlite.py."""

from __future__ import annotations

from penstock.claims.sql import SqlClaims, claims_on
from penstock.stores.context import Context


def open_claims(url: str, context: Context) -> SqlClaims:
    return claims_on(context.store(url), context)
