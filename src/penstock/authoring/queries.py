"""Selector strings: CSS with `::text` and `::attr()`, and XPath, compiled once, run by turbohtml.

See `selectors` for the API of users.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeAlias

from turbohtml import Document, Element, Node, Text, XPath
from turbohtml.convert import ExpressionError, css_to_xpath

Found: TypeAlias = Node | str | float | bool
# An element to try a selector on: turbohtml reports an invalid selector only when it is used.
_PROBE = Element("p")
# Compiled selectors in the cache. A pipeline has dozens. Code that makes a new selector for each
# page must not use unlimited memory.
_MAX_COMPILED = 4096


class Query:
    """Elements by CSS. Results are in document order, as those of XPath, because parsel does so."""

    __slots__ = ("compound", "css", "reach", "source", "steady")
    strings = False  # True if the results are strings (texts or attributes), not elements

    def __init__(self, source: str, css: str) -> None:
        self.source, self.css = source, css
        # Bytes of a page that were recently enough for this query and the queries after it.
        self.reach = 0
        # Below an element, parsel also checks the element itself, and ignores elements above it.
        # Without a combinator, that is `matches` and `select`.
        self.compound = not re.search(
            r"[\s>+~]", re.sub(r"\[[^\]]*\]|\([^()]*\)|\s*,\s*", "", css.strip())
        )
        self.steady = ":" not in css  # pseudo-classes may depend on content after the element

    def select(self, node: Node) -> list[Element]:
        if type(node) is Document:
            return node.select(self.css)
        if self.compound:
            inside = node.select(self.css)
            return [node, *inside] if type(node) is Element and node.matches(self.css) else inside
        try:
            return [
                n for n in _evaluate(_compile_relative(self.css, ""), node) if type(n) is Element
            ]
        except ExpressionError:  # not possible in XPath 1.0 (`:dir()`, …): use the browser's rules
            return node.select(self.css)

    def of(self, match: Element) -> str | None:
        """Return the text of the first match, or None if other matches must be checked."""
        return match.html

    def first(self, node: Node) -> str | None:
        found = (
            node.select_one(self.css)
            if type(node) is Document
            else next(iter(self.select(node)), None)
        )
        if found is None:
            return None
        value = self.of(found)
        return value if value is not None else next(iter(self.all(node)), None)

    def all(self, node: Node) -> list[str]:
        return [n.html for n in self.select(node)]

    def found(self, node: Node) -> Iterable[Found]:
        return self.select(node)


class _Attr(Query):
    __slots__ = ("name",)
    strings = True

    def __init__(self, source: str, css: str, name: str) -> None:
        super().__init__(source, css)
        self.name = name

    def of(self, match: Element) -> str | None:
        return match.attr(self.name)

    def all(self, node: Node) -> list[str]:
        name = self.name
        return [value for n in self.select(node) if (value := n.attr(name)) is not None]

    found = all


class _Texts(Query):
    __slots__ = ()
    strings = True

    def of(self, match: Element) -> str | None:
        for child in match:
            if type(child) is Text:
                return child.data
            if type(child) is Element:
                break  # a match inside that element would be first
        return None

    def all(self, node: Node) -> list[str]:
        matches = self.select(node)
        texts: list[str] = []
        for match in matches:
            for child in match:
                if type(child) is Text:
                    texts.append(child.data)
                elif type(child) is Element and len(matches) > 1:
                    return self._in_document_order(node, matches)
        return texts

    def _in_document_order(self, node: Node, matches: list[Element]) -> list[str]:
        """Return the texts in document order if matches may contain each other.

        The text of the inner match is then inside the text of the outer one.
        """
        try:
            return [
                t
                for t in _evaluate(_compile_relative(self.css, "/text()"), node)
                if isinstance(t, str)
            ]
        except ExpressionError:
            wanted = set(matches)
            return [n.data for n in node.descendants if type(n) is Text and n.parent in wanted]

    found = all


class Path(Query):
    """XPath of the user, or CSS that only XPath can express.

    Examples are `:contains()`, and parts with different pseudo-elements.
    """

    __slots__ = ("path", "variables")

    def __init__(self, source: str, path: XPath, variables: dict[str, Any] | None = None) -> None:
        self.source, self.path, self.variables, self.steady = source, path, variables or {}, False

    def found(self, node: Node) -> Iterable[Found]:
        try:
            return _evaluate(self.path, node, self.variables)
        except (ValueError, TypeError) as e:
            raise ValueError(f"XPath {self.source!r}: {str(e).removeprefix('xpath: ')}") from None

    def first(self, node: Node) -> str | None:
        return next((string(n) for n in self.found(node)), None)

    def all(self, node: Node) -> list[str]:
        return [string(n) for n in self.found(node)]


def _evaluate(path: XPath, node: Node, variables: dict[str, Any] | None = None) -> Iterable[Found]:
    # In parsel the context is the root element, not the document: `page.xpath("body/h1")`.
    context = (node.root or node) if type(node) is Document else node
    result = path(context, **variables) if variables else path(context)
    return result if isinstance(result, list) else (result,)


def string(found: Found) -> str:
    if isinstance(found, str):
        return found
    if isinstance(found, Node):
        return found.html
    return ("1" if found else "0") if isinstance(found, bool) else str(found)


@lru_cache(_MAX_COMPILED)
def _compile_relative(css: str, tail: str) -> XPath:
    """Compile `css` as parsel applies it below an element. `tail` is added to each of its parts."""
    return XPath(" | ".join(css_to_xpath(part) + tail for part in _split(css)))


# turbohtml's CSS has no `:contains("…")`, but cssselect has. It is replaced by an attribute test,
# which becomes a text test in XPath.
_CONTAINS, _CONTAINS_ATTRIBUTE = (
    re.compile(r":contains\(\s*(\"[^\"]*\"|'[^']*'|[\w-]+)\s*\)"),
    "penstock-contains",
)
_PSEUDO = re.compile(
    r"""::(?: (?P<text>text) | attr\( \s* """
    r"""(?: "(?P<q>[^"\\]+)" | '(?P<a>[^'\\]+)' | (?P<name>[^\s"'()\\,]+) ) \s* \) )$""",
    re.VERBOSE,
)


@lru_cache(_MAX_COMPILED)
def css(source: str) -> Query:
    """Compile a CSS selector. Raise ValueError with the selector.

    Compiled queries are shared, because they hold no page.
    """
    if not isinstance(source, str):
        raise TypeError(f"a CSS selector is a string, not {type(source).__name__}")
    try:
        if "::" not in source and ":contains(" not in source:
            _PROBE.matches(source)
            return Query(source, source)
        parts = [_pseudo(part) for part in _split(source)]
        tails = {tail for _, tail in parts}
        plain = ", ".join(part for part, _ in parts)
        if ":contains(" not in source and len(tails) == 1:
            _PROBE.matches(plain)
            tail = tails.pop()
            return (
                _Texts(source, plain)
                if tail == "/text()"
                else _Attr(source, plain, tail[2:])
                if tail
                else Query(source, plain)
            )
        paths = [
            css_to_xpath(_CONTAINS.sub(rf"[{_CONTAINS_ATTRIBUTE}*=\1]", part)) + tail
            for part, tail in parts
        ]
        return Path(source, XPath(" | ".join(paths).replace("@" + _CONTAINS_ATTRIBUTE, ".")))
    except (ValueError, ExpressionError) as e:
        reason = str(e).rpartition('": ')[2]
        raise ValueError(f"CSS selector {source!r}: {reason}") from None


@lru_cache(_MAX_COMPILED)
def xpath(query: str) -> Path:
    try:
        return Path(query, XPath(query))
    except (ValueError, TypeError) as e:
        raise ValueError(f"XPath {query!r}: {e}") from None


def _pseudo(part: str) -> tuple[str, str]:
    """Split one part of a selector into CSS without its pseudo-element and an XPath step for it."""
    match = _PSEUDO.search(part)
    if match is None:
        if "::attr" in part:
            raise ValueError("::attr(name) takes one attribute name and comes last")
        return part, ""
    plain = part[: match.start()]
    if not plain.strip() or plain[-1] in " \t\n\r\f>+~":
        plain += "*"  # "div ::text" is "div *::text"
    name = match["q"] or match["a"] or match["name"]
    return plain, "/text()" if match["text"] else "/@" + name


def _split(css: str) -> list[str]:
    """Split a selector at its commas.

    Commas in strings, brackets and parentheses, or after a backslash, do not count.
    """
    parts, start, depth, quote, i = [], 0, 0, "", 0
    while i < len(css):
        c = css[i]
        if c == "\\":
            i += 1
        elif quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in "([":
            depth += 1
        elif c in ")]":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(css[start:i].strip())
            start = i + 1
        i += 1
    parts.append(css[start:].strip())
    return parts
