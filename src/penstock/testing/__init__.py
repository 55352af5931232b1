"""What tests share and others may use for their own adapters: the pretend web, conformance suites,
simulation. Nothing here runs in production.
"""
