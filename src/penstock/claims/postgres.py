"""Claims in PostgreSQL, shared by all machines that reach the server.

See `claims.sql` for the SQL and `stores.postgres` for the connections.
"""

from __future__ import annotations

from penstock.claims.sql import SqlClaims, claims_on
from penstock.stores.context import Context


def open_claims(url: str, context: Context) -> SqlClaims:
    return claims_on(context.server(url), context)
