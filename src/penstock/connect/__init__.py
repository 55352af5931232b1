"""Kafka Connect connectors of a pipeline: rendered, compared with a Connect worker, applied.

The connectors run on the Connect worker.
"""
