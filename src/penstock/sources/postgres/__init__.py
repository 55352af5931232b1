"""Opens PostgreSQL sources: the log of changes (postgres+cdc:) or a table (postgres+table:)."""

from __future__ import annotations

from penstock.authoring.pipeline import SourceSpec
from penstock.errors import ConfigError
from penstock.ports import Source
from penstock.sources.base import SourceContext
from penstock.sources.postgres.cdc import CdcSource
from penstock.sources.postgres.settings import cdc_settings, table_settings
from penstock.sources.postgres.table import TableSource


def open_source(spec: SourceSpec, context: SourceContext) -> Source:
    kind = spec.url.partition(":")[0].partition("+")[2]
    if kind == "cdc":
        return CdcSource(spec, context, cdc_settings(spec, context.config))
    if kind == "table":
        return TableSource(spec, context, table_settings(spec))
    raise ConfigError(
        f"source {spec.name}: PostgreSQL can be read in two ways, and "
        f"{spec.url.partition(':')[0]}: is neither",
        hint="postgres+cdc://… reads the log of changes (needs wal_level=logical), "
        "postgres+table://… takes rows from a table",
    )
