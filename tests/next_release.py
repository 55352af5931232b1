"""A test build of the next release: this source with one more migration, and a higher number."""

from __future__ import annotations

import re
from pathlib import Path

import penstock
from penstock.stores.migrations.versions import newest

SOURCE = Path(penstock.__file__).parent
RELEASE = "9.9.9"
MIGRATION = """
from penstock.stores.migrations.base import Backfill, Migration, Sql

MIGRATION = Migration(
    number={number},
    title="count the visits of each event",
    part="ledger",
    steps=(
        Sql("ALTER TABLE event ADD COLUMN visits INTEGER"),
        Backfill("event", "n", "UPDATE event SET visits=n WHERE n>?1 AND n<=?2"),
    ),
)
"""


def build(folder: Path) -> Path:
    """Make the build as links to the source, and return the folder for PYTHONPATH."""
    migrations = folder / "penstock" / "stores" / "migrations"
    migrations.mkdir(parents=True)
    for inner in ("", "stores", "stores/migrations"):
        for path in (SOURCE / inner).iterdir():
            target = folder / "penstock" / inner / path.name
            if not target.exists() and path.name not in ("__init__.py", "__pycache__"):
                target.symlink_to(path)
        text = (SOURCE / inner / "__init__.py").read_text()
        text = re.sub(r'__version__ = ".*"', f'__version__ = "{RELEASE}"', text)
        (folder / "penstock" / inner / "__init__.py").write_text(text)
    number = newest() + 1
    (migrations / f"m{number:04}_visits.py").write_text(MIGRATION.format(number=number))
    return folder
