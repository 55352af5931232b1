"""Test tools for this project and for other adapters: web server, conformance suite, clock, proxy.

They are not used in production.
"""
