"""Test tools for this project and for other adapters: web server, conformance suites, clock, proxy.

They are not used in production.
"""
