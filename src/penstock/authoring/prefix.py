"""Parsed prefix of a page, and the queries that it can answer like the whole page.

`selectors` decides when to try it.
"""

from __future__ import annotations

import re

from turbohtml import Document, Element, Node
from turbohtml import parse as parse_html

from penstock.authoring.queries import Query

SMALLEST = 2 << 10  # bytes of the shortest prefix
# While one of these is open, later content may change elements before it.
_CHANGES_EARLIER_CONTENT = frozenset({"select", "option", "optgroup", "template"})
# <body, <html and <frameset. Other matches only mean that the whole page is parsed.
_changes_prefix = re.compile(rb"<[bhfBHF][otrOTR][dmaDMA][ylmYLM]").search
_FORMATTING = frozenset(
    {
        "a",
        "b",
        "big",
        "code",
        "em",
        "font",
        "i",
        "nobr",
        "s",
        "small",
        "strike",
        "strong",
        "tt",
        "u",
    }
)


class Beginning:
    """The tree of a page's first bytes.

    Later content is added at the end of open elements, or before an open table. So an element that
    is closed and not inside an open table is final.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self._open: set[Node] = set()  # empty if no element is final
        self._table: Element | None = None  # the outermost open table
        # A formatting element is open. A badly nested end tag of it moves elements to other
        # parents.
        self._formatted = False
        root = document.root
        body = _last_element(root) if root is not None else None
        # The prefix ends in the head, or after the body.
        if root is None or body is None or body.tag != "body" or not len(body):
            return
        if self._collect_open(body):
            self._open |= {root, body}
        else:
            self._open.clear()

    def _collect_open(self, node: Element | None) -> bool:
        """Collect the open elements on the path to the end of the prefix.

        Return False if one of them may still change content before it.
        """
        while node is not None:
            if node.tag in _CHANGES_EARLIER_CONTENT:
                return False
            self._open.add(node)
            if node.tag == "table":
                self._table = self._table or node
                # Content that is not allowed in a table is moved before it, and may still be open.
                before = node.previous_sibling
                return self._collect_open(before) if isinstance(before, Element) else True
            self._formatted = self._formatted or node.tag in _FORMATTING
            node = _last_element(node)
        return True

    def first(self, query: Query) -> str | None:
        """Return the text of the whole page's first match, or None if the prefix is not enough."""
        if not (self._open and query.steady) or (self._formatted and not query.compound):
            return None
        found = self.document.select_one(query.css)
        if (
            found is None
            or found in self._open
            or (self._table is not None and self._table in found.ancestors)
        ):
            return None
        return query.of(found)


def beginning(body: bytes, encoding: str | None, size: int) -> Beginning | None:
    """Parse the first `size` bytes of a page.

    Return None if the prefix is more than half of the page, if its header does not declare UTF-8,
    or if a later `<html>`, `<body>` or `<frameset>` tag could change the prefix.
    """
    if (
        2 * size > len(body)
        or encoding is None
        or encoding.lower() not in ("utf-8", "utf8")
        or body.startswith((b"\xff\xfe", b"\xfe\xff"))
    ):
        return None
    cut = body.rfind(b">", 0, size) + 1
    return (
        Beginning(parse_html(body[:cut], encoding=encoding, positions=False))
        if cut and not _changes_prefix(body, cut)
        else None
    )


def _last_element(node: Element) -> Element | None:
    """Return the last child if it is an element, else None."""
    last = node[-1] if len(node) else None
    return last if isinstance(last, Element) else None
