"""The engine: carries events from accepted to ended, on any broker and store."""
