"""Claims in PostgreSQL, shared by all machines that reach the server. See `claims.sql`."""

from penstock.claims.sql import open_claims as open_claims
