"""Kafka Connect beside a pipeline: connectors rendered from it, compared with a worker, applied,
watched. No connector runs here.
"""
