"""The PostgreSQL store: connections, transactions, locks."""
