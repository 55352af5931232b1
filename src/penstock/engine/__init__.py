"""The engine: processes events from acceptance to their end, on any broker and store."""
