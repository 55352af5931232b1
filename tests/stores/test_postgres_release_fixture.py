"""The PostgreSQL schema of an earlier release is read and processed by the current code."""

from __future__ import annotations

import gzip
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql
from tests.releases import FOLDER, RELEASES, ReleasedProject, check_end, recorded_figures
from tests.servers import Handle

pytestmark = pytest.mark.server("postgres")


@contextmanager
def restored(url: str, release: str) -> Iterator[str]:
    """Restore the dump into a new database, and return its URL."""
    name = f"release_{secrets.token_hex(6)}"
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            database = urlsplit(url)._replace(path=f"/{name}").geturl()
            with psycopg.connect(database) as connection:
                connection.execute(
                    gzip.decompress((FOLDER / release / "postgres.sql.gz").read_bytes())
                )
            yield database
        finally:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.mark.parametrize("release", RELEASES)
async def test_database_of_release_is_processed(
    release: str, server: Callable[[str], Handle], tmp_path: Path
) -> None:
    recorded = recorded_figures(release, "postgres")
    with restored(server("postgres").url, release) as url:
        stores = {f"PENSTOCK_{name}_URL": url for name in ("BROKER", "LEDGER", "CLAIMS", "PAGES")}
        project = ReleasedProject(release, "postgres", tmp_path, **stores)
        _, err = await project.command("run", "--until-idle", code=3)
        assert "penstock migrate" in err
        await project.penstock("migrate")
        assert await project.status() == recorded

        await project.process_open_events()
        check_end(recorded, await project.status())
        project.check_sinks()
