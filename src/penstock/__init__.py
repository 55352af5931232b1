"""Penstock: something changed goes in, one correct row comes out."""

from penstock.authoring.changes import Change
from penstock.authoring.page import Page
from penstock.authoring.pipeline import Pipeline
from penstock.model import ErrorClass, Event, Failure, Follow, Removed, Route

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
__version__ = "0.2.0.dev0"
