"""TOML form of a pipeline: checked, then compiled to the same Pipeline as Python declarations.

Transforms are a closed list, and no code is evaluated.
"""

from __future__ import annotations

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
from penstock.config.options import suggest
from penstock.errors import ConfigError
from penstock.model import ErrorClass, Failure, Follow

MAX_PATTERN = 500  # characters
# Characters of a value that a regex searches, so that a slow pattern never searches megabytes. The
# time limit of the page ends a pattern that is still too slow.
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

    def read(self, page: _PageReader) -> Any:
        """Return the value of the first source that has a readable one.

        Raise Failure if values were found, but none is readable and there is no default. A required
        field without a value is a Failure too.
        """
        unreadable: Unreadable | None = None
        for kind, query in self.sources:
            try:
                values = self._values(page, kind, query)
            except Unreadable as e:
                unreadable = e
                continue
            if values:
                if self.join is not None:
                    return self.join.join(v if isinstance(v, str) else str(v) for v in values)
                return values if self.many else values[0]
        if self.has_default:
            return self.default
        if unreadable is not None:
            raise Failure(ErrorClass.PERMANENT, f"field {self.name!r}: {unreadable}")
        if self.required:
            raise Failure(
                ErrorClass.PERMANENT,
                f"field {self.name!r} is required, "
                f"and {' and '.join(q for _, q in self.sources)} found nothing",
            )
        return [] if self.many and self.join is None else None

    def _values(self, page: _PageReader, kind: str, query: str) -> list[Any]:
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


class _PageReader:
    """A page while its fields are read. JSON is decoded at most once."""

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
                # `get` stops at the first match. If that one is empty, the others are read.
                return iter((first,)) if first and first.strip() else iter(found.getall())
            return (s.text for s in found)  # without ::text, the whole text of each element
        steps = query.split(".")
        if kind == "json":
            if self._json is None:
                try:
                    self._json = [self.page.json()]
                except (msgspec.DecodeError, UnicodeError, RecursionError):
                    # Not JSON, so this source has no values. `required` decides if that matters.
                    self._json = []
            return (v for item in self._json for v in _follow_path(item, steps))
        if self._jsonld is None:
            self._jsonld = list(self.page.jsonld())
        typed = [item for item in self._jsonld if steps[0] in _types(item)]
        return (
            (v for item in typed for v in _follow_path(item, steps[1:]))
            if typed
            else (v for item in self._jsonld for v in _follow_path(item, steps))
        )


def _types(item: dict[str, Any]) -> Sequence[Any]:
    kind = item.get("@type", ())
    return kind if isinstance(kind, list) else (kind,)


def _follow_path(value: Any, steps: list[str]) -> Iterator[Any]:
    """Follow a dotted path. A step that is a number selects an item of a list. Any other step is
    applied to each item.
    """
    for i, step in enumerate(steps):
        if isinstance(value, list):
            if step.lstrip("-").isdigit():
                try:
                    value = value[int(step)]
                except (IndexError, ValueError):
                    return
                continue
            for item in value:
                yield from _follow_path(item, steps[i:])
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
    """Compile a TOML pipeline. Raise ConfigError with the path inside the file.

    Example: `shop.toml: extract[0].fields.price.cs: unknown key; did you mean css?`
    """
    try:
        data = tomllib.loads(source.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ConfigError(
            f"{where}: not valid TOML: {e}",
            hint="fix that line: strings need quotes, tables are [name] or [[name]]",
        ) from None
    try:
        return _pipeline(data)
    except ConfigError as e:
        raise ConfigError(f"{where}: {e.message}", hint=e.hint) from None


def _pipeline(data: dict[str, Any]) -> Pipeline:
    _check_keys(data, _SECTIONS, "")
    head = data.get("pipeline")
    if not isinstance(head, dict):
        raise ConfigError("there is no [pipeline]", hint='[pipeline]\nname = "shop"')
    _check_keys(head, ("name",), "pipeline")
    pipeline = Pipeline(head.get("name", ""))
    extracts = _tables(data, "extract")
    for i, table in enumerate(extracts):
        path = f"extract[{i}]"
        _check_keys(table, _EXTRACT, path)
        if "name" not in table and len(extracts) > 1:
            raise ConfigError(
                f"{path}: each of several [[extract]] needs a name",
                hint='write name = "product". Records have it, so it must not depend on the order',
            )
        fields = table.get("fields", {})
        if not isinstance(fields, dict):
            _raise_wrong_type(f"{path}.fields", "a table", fields)
        follow = _strings(table.get("follow", []), f"{path}.follow")
        for j, css in enumerate(follow):
            _check_query("css", css, f"{path}.follow[{j}]")
        if not fields and not follow:
            raise ConfigError(
                f"{path}: neither fields nor follow, so it does nothing",
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
                    hint="write the name of one of the fields, or a list of them",
                )
        _declare(pipeline, path, table, compiled, tuple(follow))
    for name, declare in (("sink", pipeline.sink), ("source", pipeline.source)):
        for i, table in enumerate(_tables(data, name)):
            _declare_from_table(declare, table, f"{name}[{i}]")
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
            reading = _PageReader(page)
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
    if fields:
        pipeline.yielding.add(pipeline.extractors[-1].name)


def _field(name: str, spec: Any, path: str) -> _Field:
    if name == "_penstock" or not name:
        raise ConfigError(
            f"{path}: the name {name!r} is reserved", hint="use another name for the field"
        )
    table: dict[str, Any] = {"css": spec} if isinstance(spec, str) else spec
    if not isinstance(table, dict):
        _raise_wrong_type(path, "a CSS selector or a table", spec)
    _check_keys(table, _FIELD, path)
    sources = []
    for kind in table:  # in the order of the file: the first source with a value is used
        if kind in _SOURCES:
            for query in _strings(table[kind], f"{path}.{kind}"):
                _check_query(kind, query, f"{path}.{kind}")
                sources.append((kind, query))
    if ("const" in table) == bool(sources):
        raise ConfigError(
            f"{path}: needs "
            f"{'either a selector or const, not both' if sources else 'a selector or const'}",
            hint=f'{name} = "h1::text"',
        )
    transform_name = table.get("as", "strip")
    if not isinstance(transform_name, str) or (
        transform_name not in TRANSFORMS and transform_name != "list"
    ):
        raise ConfigError(
            f"{path}.as: {transform_name!r} is not a transform"
            f"{_suggest(transform_name, (*TRANSFORMS, 'list'))}",
            hint="use one of " + ", ".join((*TRANSFORMS, "list")),
        )
    for flag in ("required", "many"):
        if not isinstance(table.get(flag, False), bool):
            _raise_wrong_type(f"{path}.{flag}", "true or false", table[flag])
    if not isinstance(table.get("join", ""), str):
        _raise_wrong_type(f"{path}.join", "a string", table["join"])
    if table.get("required") and ("default" in table or "const" in table):
        raise ConfigError(
            f"{path}: required and {'default' if 'default' in table else 'const'} "
            "exclude each other",
            hint="keep one of them",
        )
    return _Field(
        name=name,
        sources=tuple(sources),
        transform=TRANSFORMS["strip" if transform_name == "list" else transform_name],
        html=transform_name == "html",
        regex=_regex(table.get("regex"), path),
        many=transform_name == "list" or "join" in table or table.get("many", False),
        join=table.get("join"),
        required=table.get("required", False),
        default=table.get("const", table.get("default")),
        has_default="const" in table or "default" in table,
    )


def _check_query(kind: str, query: str, path: str) -> None:
    try:
        if kind == "css":
            queries.css(query)
        elif kind == "xpath":
            queries.xpath(query)
        elif not query or "" in query.split("."):
            raise ValueError(f"{query!r} is not a dotted path")
    except ValueError as e:
        hint = (
            'write for example "offers.price"'
            if kind.startswith("json")
            else "try it with `penstock fetch URL`, then Page.from_file(…).css(…) in Python"
        )
        raise ConfigError(f"{path}: {e}", hint=hint) from None


def _regex(pattern: Any, path: str) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    if not isinstance(pattern, str) or not pattern or len(pattern) > MAX_PATTERN:
        _raise_wrong_type(
            f"{path}.regex",
            f"a pattern of at most {MAX_PATTERN} characters",
            pattern if not isinstance(pattern, str) else f"{len(pattern)} characters",
        )
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as e:
        raise ConfigError(
            f"{path}.regex: {e}",
            hint="use Python's re syntax, in single quotes so that TOML keeps backslashes",
        ) from None


def _declare_from_table(declare: Callable[..., None], table: dict[str, Any], path: str) -> None:
    if "url" not in table:
        raise ConfigError(
            f"{path}: url is missing{_suggest('url', table)}",
            hint='write url = "jsonl:products.jsonl"'
            if path.startswith("sink")
            else "write url = and the URL of the source",
        )
    try:
        declare(**table)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e.message}", hint=e.hint) from None


def _tables(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    tables = data.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise ConfigError(
            f"{name}: must be a list of tables", hint=f"write [[{name}]], with two brackets"
        )
    return tables


def _strings(value: Any, path: str) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if (
        not isinstance(values, list)
        or not all(isinstance(v, str) for v in values)
        or (not values and not path.endswith(".follow"))
    ):
        _raise_wrong_type(path, "a string or a list of strings", value)
    return values


def _check_keys(table: dict[str, Any], keys: Sequence[str], path: str) -> None:
    for key in table:
        if key not in keys:
            raise ConfigError(
                f"{path}{'.' if path else ''}{key}: unknown key{_suggest(key, keys)}",
                hint="known keys: " + ", ".join(keys),
            )


def _suggest(name: Any, known: Any) -> str:
    hint = suggest(str(name), known, cutoff=0.5)
    return f"; {hint}" if hint else ""


def _raise_wrong_type(path: str, expected: str, value: Any) -> NoReturn:
    raise ConfigError(
        f"{path}: expected {expected}, found {value!r}",
        hint="see the chapter on TOML pipelines in the documentation",
    )
