"""Runs the user's extractors on one page, and makes records and links of the values they yield.

Child processes and time limits are handled in `sandbox`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from penstock.authoring.page import Page, wrong_link
from penstock.authoring.pipeline import Extractor, Pipeline
from penstock.authoring.routing import WrongValue, read_priority, read_route, read_window
from penstock.errors import PenstockError
from penstock.model import (
    REMOVED,
    ErrorClass,
    Failure,
    Follow,
    Link,
    Priority,
    Reason,
    Record,
    Removed,
)
from penstock.ports import Extracted
from penstock.rules.identity import BadUrl
from penstock.rules.reasons import sentence

MAX_OUTPUT = 16 << 20  # bytes of records and links of one page
MAX_RECORDS = 10_000
MAX_LINKS = 50_000
MAX_KEY = 4096  # characters of a record key
MAX_DETAIL = 8192  # characters of a traceback
RESERVED = "_penstock"

_encode = msgspec.json.Encoder().encode
_canonical = msgspec.json.Encoder(order="deterministic").encode
_PLAIN = frozenset({str, int, bool, type(None)})
_PENSTOCK_FILES = frozenset(
    str(Path(__file__).parents[1] / name)
    for name in (
        "extraction/run.py",
        "authoring/selectors.py",
        "authoring/prefix.py",
        "authoring/queries.py",
        "authoring/toml.py",
        "authoring/page.py",
        "model.py",
    )
)


class _InvalidRecord(Exception):
    """A value that user code yielded is not a valid record. The message is the reason."""


def run(pipeline: Pipeline, page: Page, *, max_output: int = MAX_OUTPUT) -> Extracted:
    """Run every extractor that matches the page.

    An Exception, SystemExit or wrong value of user code is not raised. The result then has the
    error, and neither records nor links of this page.
    """
    extractors = pipeline.matching(page.url, page.requested_url)
    out = Extracted(matched=bool(extractors))
    bytes_left, untaken = max_output, pipeline.untaken
    extractor: Extractor | None = None
    try:
        for extractor in extractors:
            values = _yields(extractor, page)
            for value in values:
                if type(value) is Follow:
                    try:
                        link = _link(value, extractor, page)
                    except WrongValue as e:
                        raise _wrong_link(e, extractor, values) from None
                    out.links.append(link)
                    bytes_left -= len(link.url)
                else:
                    if untaken and extractor.name in untaken:
                        raise _NotTaken
                    make = _removal if type(value) is Removed else _record
                    record = make(value, extractor, page, len(out.records))
                    out.records.append(record)
                    bytes_left -= len(record.fields)
                if bytes_left < 0 or len(out.records) > MAX_RECORDS or len(out.links) > MAX_LINKS:
                    raise _InvalidRecord(_describe_excess(out, max_output))
    except _InvalidRecord as e:
        out = Extracted(
            error=_line(f"{extractor.name if extractor else ''}: {e}"),
            kind=ErrorClass.PERMANENT.value,
        )
    except _NotTaken:
        out = Extracted(
            error=sentence(
                Reason.NO_SINK,
                extractor.name if extractor else "",
                detail="add it to `only` of a sink",
            ),
            code=Reason.NO_SINK,
            kind=ErrorClass.PERMANENT.value,
        )
    except _EmptyKey as e:
        out = Extracted(
            error=_line(sentence(Reason.EMPTY_KEY, detail=e)),
            code=Reason.EMPTY_KEY,
            kind=ErrorClass.PERMANENT.value,
        )
    except Failure as e:
        out = Extracted(
            error=_line(e.reason),
            code=None if e.code is Reason.OTHER else e.code,
            kind=ErrorClass(e.kind).value,
            detail=(e.detail or _trace(e))[-MAX_DETAIL:],
            after=e.after,
        )
    except MemoryError as e:
        # The memory limit of this process was reached, perhaps because of other pages. So the page
        # runs again alone, as after a crash.
        out = Extracted(
            error=_line(_describe_error(e)),
            code=Reason.MEMORY,
            kind=ErrorClass.POISON.value,
            detail=_trace(e),
        )
    except (Exception, SystemExit, GeneratorExit) as e:
        out = Extracted(
            error=_line(_describe_error(e)), kind=ErrorClass.PERMANENT.value, detail=_trace(e)
        )
    out.read_event, out.read_headers = page.event_was_read, page.headers_were_read
    if out.error and extractor is not None:
        out.extractor = extractor.name
    return out


class _EmptyKey(Exception):
    """A record without a key. It could neither replace another record nor be replaced."""


class _NotTaken(Exception):
    """A record that neither a sink nor a hook takes, so it would be dropped."""


# -- values of the function ------------------------------------------------------------------------


def _yields(extractor: Extractor, page: Page) -> Generator[Any, None, None]:
    result = extractor.fn(page)
    is_iterator = isinstance(result, Iterator)
    if is_iterator:
        returned = yield from result
        if returned is not None:
            raise _InvalidRecord(
                f"returned a {type(returned).__name__} after yielding, which would be lost; "
                "yield it"
            )
    elif isinstance(result, (list, tuple, set, str, bytes)):
        raise _InvalidRecord(
            f"returned a {type(result).__name__}; yield its records one by one (`yield from …`)"
        )
    elif result is not None:
        yield result


def _link(follow: Follow, extractor: Extractor, page: Page) -> Link:
    url, priority, route, window = follow.url, follow.priority, follow.route, follow.window
    if not isinstance(url, str):
        raise _InvalidRecord(f"yielded Follow({_describe(url)}); its first argument is a URL")
    if type(priority) is not Priority or route is not None or window is not None:
        priority, window = read_priority(priority), read_window(window)
        route = None if route is None else read_route(route)
    if url not in page.followed:  # not made by page.follow, so it may be relative
        try:
            url = page.urljoin(url)
        except BadUrl as e:
            raise _InvalidRecord(
                f"yielded Follow({follow.url[:200]!r}), which cannot be fetched: {e}"
            ) from None
    return Link(
        url=url,
        extractor=extractor.name,
        priority=priority,
        route=route,
        window=window,
    )


def _wrong_link(e: WrongValue, extractor: Extractor, values: Generator[Any, None, None]) -> Failure:
    """Return the failure of a Follow with a wrong value, with the line that yields it."""
    code = getattr(extractor.fn, "__code__", None)
    file, line = (code.co_filename, code.co_firstlineno) if code else (extractor.name, 0)
    inner: Any = values
    while (inner := getattr(inner, "gi_yieldfrom", None)) is not None:
        frame = getattr(inner, "gi_frame", None)
        if frame is not None and frame.f_code.co_filename not in _PENSTOCK_FILES:
            file, line = frame.f_code.co_filename, frame.f_lineno
    failure = wrong_link(e, file, line)
    failure.detail = f'File "{file}", line {line}, in {extractor.name}\n{failure.reason}'
    return failure


def _record(value: Any, extractor: Extractor, page: Page, index: int) -> Record:
    fields = value if type(value) is dict else _as_dict(value)
    if fields is None:
        raise _InvalidRecord(
            f"yielded {_describe(value)}; yield a dict, a dataclass or a model, "
            "and links by `yield from page.follow(…)`"
        )
    clean: dict[str, Any] = fields
    for name, field in fields.items():
        if type(name) is not str:
            raise _InvalidRecord(f"field name {name!r} is {_describe(name)}; names are strings")
        if type(field) not in _PLAIN:
            if clean is fields:
                clean = dict(fields)
            try:
                clean[name] = _clean(field, name)
            except RecursionError:
                raise _InvalidRecord(
                    f"field {name!r} is nested too deeply, or contains itself"
                ) from None
    if RESERVED in clean:
        raise _InvalidRecord(f"field {RESERVED!r} is reserved; call it something else")
    try:
        body, digest = _encode(clean), hashlib.blake2b(_canonical(clean), digest_size=16).digest()
    except UnicodeEncodeError:
        name = next(n for n, v in clean.items() if _has_surrogates(n) or _has_surrogates(v))
        raise _InvalidRecord(
            f"field {name!r} holds half a surrogate pair, which is no text; "
            ".encode('utf-8', 'replace') gets rid of it"
        ) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise _InvalidRecord(
            f"field {_first_bad_field(clean)!r} cannot be written as JSON: {e}"
        ) from None
    key = page.url if extractor.key is None else _key(extractor, fields)
    return Record(
        extractor=extractor.name,
        version=extractor.version,
        key=key,
        index=index,
        fields=body,
        hash=digest,
    )


def _removal(value: Removed, extractor: Extractor, page: Page, index: int) -> Record:
    """Make a record that marks another one as removed. Both have the same key, so that it replaces
    the other one everywhere.
    """
    given, names = value.key, extractor.key
    if given is None or isinstance(given, Mapping):
        record = _record(dict(given or {}), extractor, page, index)
    elif isinstance(names, str):
        record = _record({names: given}, extractor, page, index)
    elif names is None or callable(names):
        plain = Extractor(extractor.name, extractor.version, extractor.match, "key", extractor.fn)
        record = msgspec.structs.replace(_record({"key": given}, plain, page, index), fields=b"{}")
    else:
        raise _InvalidRecord(
            f"yielded Removed({given!r}), and its key is {', '.join(names)}; "
            f"yield Removed({{{', '.join(f'{n!r}: …' for n in names)}}})"
        )
    return msgspec.structs.replace(record, hash=REMOVED, deleted=True)


def _as_dict(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Not dataclasses.asdict, which copies deeply. `_clean` handles the values anyway.
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    # pydantic models, without importing pydantic
    if not isinstance(value, type) and callable(dump := getattr(value, "model_dump", None)):
        return dict(dump())
    return None


def _clean(value: Any, where: str) -> Any:
    """Return a value that JSON can hold. Raise _InvalidRecord for others.

    The message of the exception has the path of the value. Sets are sorted, because their order
    differs between processes.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        if not math.isfinite(value):
            raise _InvalidRecord(f"field {where!r} is {value}, which JSON cannot hold; use None")
        return value
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise _InvalidRecord(f"field {where!r} is {value}, which is no number; use None")
        return value
    if isinstance(value, (list, tuple)):
        return [_clean(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return sorted((_clean(v, where) for v in value), key=_canonical)
    if kind.__module__ == "penstock.authoring.selectors":
        raise _InvalidRecord(f"field {where!r} is a {kind.__name__}; add .get() or .getall()")
    inner = _as_dict(value)
    if inner is None:
        return value  # dates, UUIDs and enums: msgspec encodes them, or raises an error
    for name in inner:
        if type(name) is not str:
            raise _InvalidRecord(f"field {where!r} has the key {name!r}; keys are strings")
    return {name: _clean(v, f"{where}.{name}") for name, v in inner.items()}


def _key(extractor: Extractor, fields: dict[Any, Any]) -> str:
    key = extractor.key
    if callable(key):
        return _part(key(dict(fields)), f"the key function of {extractor.name} gave", extractor)
    if isinstance(key, str):
        return _part(fields.get(key), f"field {key!r} is", extractor, missing=key not in fields)
    parts = [
        _part(fields.get(name), f"field {name!r} is", extractor, missing=name not in fields)
        for name in key or ()
    ]
    return "|".join(part.replace("\\", "\\\\").replace("|", "\\|") for part in parts)


def _part(value: Any, what: str, extractor: Extractor, *, missing: bool = False) -> str:
    if isinstance(value, (list, tuple, set, frozenset, dict, bytes)):
        raise _InvalidRecord(f"{what} a {type(value).__name__}, which cannot be a key")
    text = "" if value is None else str(value)
    if not text.strip():
        raise _EmptyKey(
            f"{what} {'missing' if missing else 'None' if value is None else 'empty'} "
            f"in a record of {extractor.name}"
        )
    if len(text) > MAX_KEY or (not text.isascii() and _has_surrogates(text)):
        raise _InvalidRecord(
            f"{what} no usable key: "
            f"{'longer than ' + str(MAX_KEY) if len(text) > MAX_KEY else 'not text'}"
        )
    return text


# -- error messages --------------------------------------------------------------------------------


def _describe_excess(out: Extracted, max_output: int) -> str:
    if len(out.records) > MAX_RECORDS:
        return f"more than {MAX_RECORDS} records from one page; yield them from several pages"
    if len(out.links) > MAX_LINKS:
        return f"more than {MAX_LINKS} links from one page; narrow the selector of follow()"
    return f"more than {max_output} bytes of output from one page"


def _has_surrogates(value: Any) -> bool:
    return _fails(value, UnicodeEncodeError)


def _first_bad_field(fields: dict[str, Any]) -> str:
    return next((name for name, value in fields.items() if _fails(value, Exception)), "?")


def _fails(value: Any, how: type[Exception]) -> bool:
    try:
        _encode(value)
    except Exception as e:
        return isinstance(e, how)
    return False


def _describe(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _describe_error(error: BaseException) -> str:
    if isinstance(error, PenstockError):
        return error.message
    message = _text_or_empty(lambda: str(error)) or _text_or_empty(lambda: repr(error.args))
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _text_or_empty(text_of: Callable[[], str]) -> str:
    try:
        return text_of()
    except Exception:
        return ""  # an exception whose __str__ raises is an error of the page too


def _line(text: str) -> str:
    one = " ".join(text.encode("utf-8", "replace").decode().split())
    return one if len(one) <= 500 else one[:499] + "…"


def _trace(error: BaseException) -> str:
    """Return the traceback without frames of Penstock, so that the user's line is last."""
    try:
        shown = traceback.TracebackException(type(error), error, error.__traceback__, limit=-40)
        link: traceback.TracebackException | None = shown
        while link is not None:
            link.stack = traceback.StackSummary.from_list(
                [f for f in link.stack if f.filename not in _PENSTOCK_FILES] or link.stack
            )
            link = link.__cause__ or link.__context__
        text = "".join(shown.format())
    except Exception:  # an exception of user code that cannot be formatted
        text = type(error).__name__
    return text.encode("utf-8", "replace").decode()[-MAX_DETAIL:]
