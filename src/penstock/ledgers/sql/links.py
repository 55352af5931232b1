"""Links that wait for room, in SQL."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.ledgers.sql.ledger import LedgerTable
from penstock.ports import LINKS_WAITING, LinkChunk


class SqlWaitingLinks(LedgerTable):
    """Chunks of links that wait for room, inside one transaction."""

    def store(self, page: int, topic: str, chunks: Sequence[tuple[int, bytes]]) -> None:
        self._tx.executemany(
            "INSERT INTO waiting_links(page, links, body) VALUES(?,?,?)",
            [(page, links, body) for links, body in chunks],
        )
        self._count(topic, {LINKS_WAITING: sum(links for links, _ in chunks)})

    def next_after(self, page: int, limit: int) -> list[LinkChunk]:
        found: list[LinkChunk] = []
        while len(found) < limit:
            row = self._tx.execute(
                "SELECT n, page, links, body FROM waiting_links WHERE page>?"
                " ORDER BY page, n LIMIT 1",
                (page,),
            ).get
            if row is None:
                break
            found.append(LinkChunk(row[0], row[1], row[2], bytes(row[3])))
            page = row[1]
        return found

    def holds(self, chunk: LinkChunk) -> bool:
        return (
            self._tx.execute(
                "SELECT 1 FROM waiting_links WHERE n=? AND links=?", (chunk.n, chunk.links)
            ).get
            is not None
        )

    def shorten(self, chunk: LinkChunk, topic: str, links: int, body: bytes) -> None:
        if links:
            self._tx.execute(
                "UPDATE waiting_links SET links=?, body=? WHERE n=?", (links, body, chunk.n)
            )
        else:
            self._tx.execute("DELETE FROM waiting_links WHERE n=?", (chunk.n,))
        self._count(topic, {LINKS_WAITING: links - chunk.links})
