"""The beginning of a page, parsed alone: which answers it gives are those of the whole page. Not
when it is worth trying, nor what is asked.
"""

from __future__ import annotations

import re

from turbohtml import Document, Element, Node
from turbohtml import parse as parse_html

from penstock.authoring.queries import Query

SMALLEST = 2 << 10  # bytes of a beginning
_UNSETTLED = frozenset(
    {"select", "option", "optgroup", "template"}
)  # open, these may still change what came before
_reaches_back = re.compile(
    rb"<[bhfBHF][otrOTR][dmaDMA][ylmYLM]"
).search  # <body, <html, <frameset; and what looks like them, which does no harm
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
    """The tree of a page's first bytes. What follows them is added at the end of what is still
    open, and before a table that is; so an element that is closed, and lies in no open table, is as
    it will be.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self._open: set[Node] = set()  # and nothing in it: nothing is settled
        self._table: Element | None = None  # the outermost open one
        self._formatted = (
            False  # a badly nested end tag of theirs brings elements under other parents
        )
        root = document.root
        body = _last(root) if root is not None else None
        if (
            root is None or body is None or body.tag != "body" or not len(body)
        ):  # it ends in the head, or after the body
            return
        if self._follow(body):
            self._open |= {root, body}
        else:
            self._open.clear()

    def _follow(self, node: Element | None) -> bool:
        """Note the way to the end. False: it leads through what may still change all that came
        before.
        """
        while node is not None:
            if node.tag in _UNSETTLED:
                return False
            self._open.add(node)
            if node.tag == "table":
                self._table = self._table or node
                before = (
                    node.previous_sibling
                )  # what does not belong into a table is put there, and may still be open
                return self._follow(before) if isinstance(before, Element) else True
            self._formatted = self._formatted or node.tag in _FORMATTING
            node = _last(node)
        return True

    def first(self, query: Query) -> str | None:
        """What the whole page's first match gives; None where only the whole page tells."""
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
    """None: that is most of the page, it may be cut in the middle of a character, or it has tags
    that change what was there at its start.
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
        if cut and not _reaches_back(body, cut)
        else None
    )


def _last(node: Element) -> Element | None:
    """Its last child, if that is an element."""
    last = node[-1] if len(node) else None
    return last if isinstance(last, Element) else None
