"""Outbound connections, and the guard that checks them.

Decisions about pages are made in `rules` and `fetching`.
"""
