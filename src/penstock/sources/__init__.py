"""Source adapters: each reads changes of one kind of outside system and reports findings."""
