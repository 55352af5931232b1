"""Claims, host state and proxy health on Redis."""

from penstock.claims.redis.claims import open_claims

__all__ = ["open_claims"]
