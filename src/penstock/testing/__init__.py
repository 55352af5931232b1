"""Tools for tests, shipped so that others can test their own adapters. Not used in production.

Contains the conformance suite for brokers, a test web server, a TCP proxy that breaks connections, and
a manual clock.
"""
