"""Lists of URLs in files and objects as a source."""

from penstock.sources.seeds.source import open_source

__all__ = ["open_source"]
