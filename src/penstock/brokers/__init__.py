"""Message brokers: one adapter for each kind of server."""
