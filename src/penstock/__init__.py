"""Penstock: something changed goes in, one correct row comes out."""

from penstock.model import ErrorClass, Event, Failure, Follow, Removed, Route
from penstock.page import Page
from penstock.pipeline import Change, Pipeline

__all__ = [
    "Change",
    "ErrorClass",
    "Event",
    "Failure",
    "Follow",
    "Page",
    "Pipeline",
    "Removed",
    "Route",
]
__version__ = "0.1.0"
