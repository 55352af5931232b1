"""The TOML form of a pipeline: checked, then compiled to the same Pipeline that Python declares.
Closed transforms; nothing is evaluated.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from penstock.authoring import queries
from penstock.authoring.page import Page
from penstock.authoring.pipeline import Pipeline
from penstock.authoring.selectors import SelectorList
from penstock.authoring.transforms import TRANSFORMS, Transform, Unreadable
from penstock.errors import ConfigError
from penstock.model import ErrorClass, Failure, Follow

MAX_PATTERN = 500
# characters a regex looks at: a bad pattern costs the page its time limit at most, not by the
# megabyte
MAX_SEARCHED = 100_000

_SECTIONS = ("pipeline", "extract", "sink", "source")
_EXTRACT = ("name", "match", "version", "key", "follow", "fields")
_SOURCES = ("css", "xpath", "jsonld", "json")
_FIELD = (*_SOURCES, "const", "as", "regex", "default", "required", "many", "join")


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    sources: tuple[tuple[str, str], ...]  # (kind, query) in the order of trying
    transform: Transform
    html: bool
    regex: re.Pattern[str] | None
    many: bool
    join: str | None
    required: bool
    default: Any
    has_default: bool

    def read(self, page: _Reading) -> Any:
        """The first source that gives something readable. Found but unreadable everywhere, without
        a default, is an error, never a silent None.
        """
        trouble: Unreadable | None = None
        for kind, query in self.sources:
            try:
                values = self._values(page, kind, query)
            except Unreadable as e:
                trouble = e
                continue
            if values:
                if self.join is not None:
                    return self.join.join(v if isinstance(v, str) else str(v) for v in values)
                return values if self.many else values[0]
        if self.has_default:
            return self.default
        if trouble is not None:
            raise Failure(ErrorClass.PERMANENT, f"field {self.name!r}: {trouble}")
        if self.required:
            raise Failure(
                ErrorClass.PERMANENT,
                f"field {self.name!r} is required, and {' and '.join(q for _, q in self.sources)} found nothing",
            )
        return [] if self.many and self.join is None else None

    def _values(self, page: _Reading, kind: str, query: str) -> list[Any]:
        out = []
        for raw in page.find(kind, query, html=self.html, many=self.many):
            if self.regex is not None:
                match = self.regex.search(str(raw)[:MAX_SEARCHED])
                if match is None:
                    continue
                raw = match[1] if self.regex.groups else match[0]
            value = self.transform(raw, page.page) if raw is not None else None
            if value is not None and value != "":
                out.append(value)
                if not self.many:
                    break
        return out


class _Reading:
    """A page while its fields are read: JSON is decoded at most once."""

    __slots__ = ("_json", "_jsonld", "page")

    def __init__(self, page: Page) -> None:
        self.page = page
        self._json: list[Any] | None = None
        self._jsonld: list[Any] | None = None

    def find(self, kind: str, query: str, *, html: bool, many: bool) -> Iterator[Any]:
        if kind == "css" or kind == "xpath":
            found: SelectorList = self.page.css(query) if kind == "css" else self.page.xpath(query)
            if html or (kind == "css" and queries.css(query).strings):
                first = None if many else found.get()
                # `get` stops at the first; where that one is empty the others are asked
                return iter((first,)) if first and first.strip() else iter(found.getall())
            return (s.text for s in found)  # an element without ::text is its whole text
        steps = query.split(".")
        if kind == "json":
            if self._json is None:
                try:
                    self._json = [self.page.json()]
                except (msgspec.DecodeError, UnicodeError, RecursionError):
                    # not JSON: this source has nothing, `required` says whether that matters
                    self._json = []
            return (v for item in self._json for v in _walk(item, steps))
        if self._jsonld is None:
            self._jsonld = list(self.page.jsonld())
        typed = [item for item in self._jsonld if steps[0] in _types(item)]
        return (
            (v for item in typed for v in _walk(item, steps[1:]))
            if typed
            else (v for item in self._jsonld for v in _walk(item, steps))
        )


def _types(item: dict[str, Any]) -> Sequence[Any]:
    kind = item.get("@type", ())
    return kind if isinstance(kind, list) else (kind,)


def _walk(value: Any, steps: list[str]) -> Iterator[Any]:
    """Down a dotted path; a list is entered by number, or else each of its items is."""
    for i, step in enumerate(steps):
        if isinstance(value, list):
            if step.lstrip("-").isdigit():
                try:
                    value = value[int(step)]
                except (IndexError, ValueError):
                    return
                continue
            for item in value:
                yield from _walk(item, steps[i:])
            return
        if not isinstance(value, dict) or step not in value:
            return
        value = value[step]
    if isinstance(value, list):
        yield from value
    else:
        yield value


# -- reading the file ------------------------------------------------------------------------------


def compile_toml(source: bytes, where: str) -> Pipeline:
    """Raises ConfigError that names the path inside the file: `shop.toml:
    extract[0].fields.price.cs: unknown key; did you mean css?`
    """
    try:
        data = tomllib.loads(source.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ConfigError(
            f"{where}: not valid TOML: {e}",
            hint="fix that place; strings are quoted, tables are [name] or [[name]]",
        ) from None
    try:
        return _pipeline(data)
    except ConfigError as e:
        raise ConfigError(f"{where}: {e.message}", hint=e.hint) from None


def _pipeline(data: dict[str, Any]) -> Pipeline:
    _known(data, _SECTIONS, "")
    head = data.get("pipeline")
    if not isinstance(head, dict):
        raise ConfigError("there is no [pipeline]", hint='[pipeline]\nname = "shop"')
    _known(head, ("name",), "pipeline")
    pipeline = Pipeline(head.get("name", ""))
    extracts = _tables(data, "extract")
    for i, table in enumerate(extracts):
        path = f"extract[{i}]"
        _known(table, _EXTRACT, path)
        if "name" not in table and len(extracts) > 1:
            raise ConfigError(
                f"{path}: each of several [[extract]] needs a name",
                hint='name = "product": records carry it, so it must not depend on the order',
            )
        fields = table.get("fields", {})
        if not isinstance(fields, dict):
            _wrong(f"{path}.fields", "a table", fields)
        follow = _strings(table.get("follow", []), f"{path}.follow")
        for j, css in enumerate(follow):
            _compiles("css", css, f"{path}.follow[{j}]")
        if not fields and not follow:
            raise ConfigError(
                f"{path}: neither fields nor follow: it would do nothing",
                hint='[extract.fields]\ntitle = "h1::text"',
            )
        compiled = tuple(
            _field(name, spec, f"{path}.fields.{name}") for name, spec in fields.items()
        )
        key = table.get("key")
        for name in () if key is None else _strings(key, f"{path}.key"):
            if name not in fields:
                raise ConfigError(
                    f"{path}.key: there is no field {name}{_suggest(name, fields)}",
                    hint="key is the name of one of the fields, or a list of them",
                )
        _declare(pipeline, path, table, compiled, tuple(follow))
    for i, table in enumerate(_tables(data, "sink")):
        _called(pipeline.sink, table, f"sink[{i}]")
    for i, table in enumerate(_tables(data, "source")):
        _called(pipeline.source, table, f"source[{i}]")
    return pipeline


def _declare(
    pipeline: Pipeline,
    path: str,
    table: dict[str, Any],
    fields: tuple[_Field, ...],
    follow: tuple[str, ...],
) -> None:
    def extract(page: Page) -> Iterator[dict[str, Any] | Follow]:
        if fields:
            reading = _Reading(page)
            yield {field.name: field.read(reading) for field in fields}
        for css in follow:
            yield from page.follow(css)

    try:
        pipeline.extract(
            match=table.get("match"),
            version=table.get("version", 1),
            key=table.get("key"),
            name=table.get("name", pipeline.name),
        )(extract)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e.message}", hint=e.hint) from None


def _field(name: str, spec: Any, path: str) -> _Field:
    if name == "_penstock" or not name:
        raise ConfigError(
            f"{path}: the name {name!r} is reserved", hint="call the field something else"
        )
    table: dict[str, Any] = {"css": spec} if isinstance(spec, str) else spec
    if not isinstance(table, dict):
        _wrong(path, "a CSS selector or a table", spec)
    _known(table, _FIELD, path)
    sources = []
    for kind in table:  # as written: the first that finds something wins
        if kind in _SOURCES:
            for query in _strings(table[kind], f"{path}.{kind}"):
                _compiles(kind, query, f"{path}.{kind}")
                sources.append((kind, query))
    if ("const" in table) == bool(sources):
        raise ConfigError(
            f"{path}: needs {'either a selector or const, not both' if sources else 'a selector or const'}",
            hint=f'{name} = "h1::text"',
        )
    how = table.get("as", "strip")
    if not isinstance(how, str) or (how not in TRANSFORMS and how != "list"):
        raise ConfigError(
            f"{path}.as: {how!r} is no transform{_suggest(how, (*TRANSFORMS, 'list'))}",
            hint="one of " + ", ".join((*TRANSFORMS, "list")),
        )
    for flag in ("required", "many"):
        if not isinstance(table.get(flag, False), bool):
            _wrong(f"{path}.{flag}", "true or false", table[flag])
    if not isinstance(table.get("join", ""), str):
        _wrong(f"{path}.join", "a string", table["join"])
    if table.get("required") and ("default" in table or "const" in table):
        raise ConfigError(
            f"{path}: required and {'default' if 'default' in table else 'const'} exclude each other",
            hint="keep one of them",
        )
    return _Field(
        name=name, sources=tuple(sources), transform=TRANSFORMS["strip" if how == "list" else how], html=how == "html", regex=_regex(table.get("regex"), path),
        many=how == "list" or "join" in table or table.get("many", False), join=table.get("join"), required=table.get("required", False),
        default=table.get("const", table.get("default")), has_default="const" in table or "default" in table,
    )  # fmt: skip


def _compiles(kind: str, query: str, path: str) -> None:
    try:
        if kind == "css":
            queries.css(query)
        elif kind == "xpath":
            queries.xpath(query)
        elif not query or "" in query.split("."):
            raise ValueError(f"{query!r} is no dotted path")
    except ValueError as e:
        hint = (
            'for example "offers.price"'
            if kind.startswith("json")
            else "try it: `penstock fetch URL`, then Page.from_file(…).css(…) in Python"
        )
        raise ConfigError(f"{path}: {e}", hint=hint) from None


def _regex(pattern: Any, path: str) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    if not isinstance(pattern, str) or not pattern or len(pattern) > MAX_PATTERN:
        _wrong(
            f"{path}.regex",
            f"a pattern of at most {MAX_PATTERN} characters",
            pattern if not isinstance(pattern, str) else f"{len(pattern)} characters",
        )
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as e:
        raise ConfigError(
            f"{path}.regex: {e}",
            hint="Python's re syntax, in single quotes so that TOML leaves backslashes alone",
        ) from None


def _called(declare: Callable[..., None], table: dict[str, Any], path: str) -> None:
    if "url" not in table:
        near = _suggest("url", table)
        raise ConfigError(
            f"{path}: url is missing{near}",
            hint='url = "jsonl:products.jsonl"'
            if path.startswith("sink")
            else "url = where it looks",
        )
    try:
        declare(**table)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e.message}", hint=e.hint) from None


def _tables(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    tables = data.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise ConfigError(
            f"{name}: is a list of tables", hint=f"write [[{name}]], with two brackets"
        )
    return tables


def _strings(value: Any, path: str) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if (
        not isinstance(values, list)
        or not all(isinstance(v, str) for v in values)
        or (not values and not path.endswith(".follow"))
    ):
        _wrong(path, "a string or a list of strings", value)
    return values


def _known(table: dict[str, Any], keys: Sequence[str], path: str) -> None:
    for key in table:
        if key not in keys:
            raise ConfigError(
                f"{path}{'.' if path else ''}{key}: unknown key{_suggest(key, keys)}",
                hint="known here: " + ", ".join(keys),
            )


def _suggest(name: Any, known: Any) -> str:
    near = difflib.get_close_matches(str(name), list(known), 1, 0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _wrong(path: str, expected: str, value: Any) -> NoReturn:
    raise ConfigError(
        f"{path}: expected {expected}, found {value!r}",
        hint="see the chapter on TOML pipelines in the documentation",
    )
