"""Claims, pace and robots: what a fleet must agree on before it asks a host."""
