"""Claims in an SQLite file. See `claims.sql` for the SQL and `stores.sqlite` for the file."""

from __future__ import annotations

from penstock.claims.sql import SqlClaims, claims_on
from penstock.stores.context import Context


def open_claims(url: str, context: Context) -> SqlClaims:
    return claims_on(context.store(url), context)
