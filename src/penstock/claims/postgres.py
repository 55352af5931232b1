"""The claims in PostgreSQL, shared by every machine that reaches it; the SQL is in sql.py, the
server's side in stores/postgres.py.
"""

from __future__ import annotations

from penstock.claims.sql import SqlClaims, claims_on
from penstock.stores.context import Context


def open_claims(url: str, context: Context) -> SqlClaims:
    return claims_on(context.server(url), context)
