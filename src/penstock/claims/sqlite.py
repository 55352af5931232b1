"""Claims in an SQLite file. See `claims.sql`."""

from penstock.claims.sql import open_claims as open_claims
