"""Penstock: something changed goes in, one correct row comes out."""

from penstock.model import Event, Failure, Page, Route
from penstock.pipeline import Change, Pipeline

__all__ = ["Change", "Event", "Failure", "Page", "Pipeline", "Route"]
__version__ = "0.1.0"
