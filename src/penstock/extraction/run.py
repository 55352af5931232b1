"""Running the user's extractors on one page and making Records and Links of what they yield.
Processes and limits of time are elsewhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from penstock.authoring.page import Page
from penstock.authoring.pipeline import Extractor, Pipeline
from penstock.errors import PenstockError
from penstock.model import REMOVED, ErrorClass, Failure, Follow, Link, Record, Removed
from penstock.ports import Extracted
from penstock.rules.identity import BadUrl

MAX_OUTPUT = 16 << 20  # bytes of records and links of one page
MAX_RECORDS = 10_000
MAX_LINKS = 50_000
MAX_KEY = 4096
MAX_DETAIL = 8192
RESERVED = "_penstock"

_encode = msgspec.json.Encoder().encode
_canonical = msgspec.json.Encoder(order="deterministic").encode
_PLAIN = frozenset({str, int, bool, type(None)})
_PACKAGE = Path(__file__).parents[1]
_OURS = frozenset(
    str(_PACKAGE / name)
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


class _Refused(Exception):
    """What the user's code yielded is no record; the sentence says why."""


def run(pipeline: Pipeline, page: Page, *, max_output: int = MAX_OUTPUT) -> Extracted:
    """Every extractor whose match fits. Never raises for what user code does or yields, and then
    nothing of the page is kept.
    """
    extractors = pipeline.matching(page.url, page.requested_url)
    out = Extracted(matched=bool(extractors))
    room = max_output
    extractor: Extractor | None = None
    try:
        for extractor in extractors:
            for value in _yields(extractor, page):
                if type(value) is Follow:
                    link = _link(value, extractor, page)
                    out.links.append(link)
                    room -= len(link.url)
                else:
                    make = _removal if type(value) is Removed else _record
                    record = make(value, extractor, page, len(out.records))
                    out.records.append(record)
                    room -= len(record.fields)
                if room < 0 or len(out.records) > MAX_RECORDS or len(out.links) > MAX_LINKS:
                    raise _Refused(_too_much(out, max_output))
    except _Refused as e:
        return Extracted(
            error=_line(f"{extractor.name if extractor else ''}: {e}"),
            kind=ErrorClass.PERMANENT.value,
        )
    except _EmptyKey as e:
        return Extracted(error=_line(str(e)), kind=ErrorClass.PERMANENT.value)
    except Failure as e:
        return Extracted(
            error=_line(e.reason),
            kind=ErrorClass(e.kind).value,
            detail=(e.detail or _trace(e))[-MAX_DETAIL:],
            after=e.after,
        )
    except MemoryError as e:  # the limit of this process was reached; perhaps by another page's garbage, so it is tried alone like a death
        return Extracted(error=_line(_brief(e)), kind=ErrorClass.POISON.value, detail=_trace(e))
    except (Exception, SystemExit, GeneratorExit) as e:
        return Extracted(error=_line(_brief(e)), kind=ErrorClass.PERMANENT.value, detail=_trace(e))
    return out


class _EmptyKey(Exception):
    """A record without a name: it could neither replace nor be replaced."""


# -- what the function gives -----------------------------------------------------------------------


def _yields(extractor: Extractor, page: Page) -> Iterator[Any]:
    result = extractor.fn(page)
    if not isinstance(result, Iterator):
        if result is None:
            return
        if isinstance(result, (list, tuple, set, str, bytes)):
            raise _Refused(
                f"returned a {type(result).__name__}; yield its records one by one (`yield from …`)"
            )
        yield result
        return
    while True:
        try:
            value = next(result)
        except StopIteration as stop:
            if stop.value is not None:
                raise _Refused(
                    f"returned a {type(stop.value).__name__} after yielding, which would be lost; yield it"
                ) from None
            return
        yield value


def _link(follow: Follow, extractor: Extractor, page: Page) -> Link:
    url = follow.url
    if url not in page.followed:  # made by hand, so perhaps relative
        try:
            url = page.urljoin(url)
        except BadUrl as e:
            raise _Refused(
                f"yielded Follow({follow.url[:200]!r}), which cannot be fetched: {e}"
            ) from None
    return Link(
        url=url,
        extractor=extractor.name,
        priority=follow.priority,
        route=follow.route,
        window=follow.window,
    )


def _record(value: Any, extractor: Extractor, page: Page, index: int) -> Record:
    fields = value if type(value) is dict else _as_dict(value)
    if fields is None:
        raise _Refused(
            f"yielded {_article(value)}; yield a dict, a dataclass or a model, and links by `yield from page.follow(…)`"
        )
    clean: dict[str, Any] = fields
    for name, field in fields.items():
        if type(name) is not str:
            raise _Refused(f"field name {name!r} is {_article(name)}; names are strings")
        if type(field) not in _PLAIN:
            if clean is fields:
                clean = dict(fields)
            try:
                clean[name] = _clean(field, name)
            except RecursionError:
                raise _Refused(f"field {name!r} is nested too deeply, or contains itself") from None
    if RESERVED in clean:
        raise _Refused(f"field {RESERVED!r} is reserved; call it something else")
    try:
        body, digest = _encode(clean), hashlib.blake2b(_canonical(clean), digest_size=16).digest()
    except UnicodeEncodeError:
        name = next(n for n, v in clean.items() if _broken(n) or _broken(v))
        raise _Refused(
            f"field {name!r} holds half a surrogate pair, which is no text; .encode('utf-8', 'replace') gets rid of it"
        ) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise _Refused(f"field {_culprit(clean)!r} cannot be written as JSON: {e}") from None
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
    """A record of its key alone. The key is what the record's own was, so that it replaces it
    everywhere.
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
        raise _Refused(
            f"yielded Removed({given!r}), and its key is {', '.join(names)}; yield Removed({{{', '.join(f'{n!r}: …' for n in names)}}})"
        )
    return msgspec.structs.replace(record, hash=REMOVED, deleted=True)


def _as_dict(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: getattr(value, f.name) for f in dataclasses.fields(value)
        }  # not asdict: it copies deeply, and we look inside anyway
    if not isinstance(value, type) and callable(
        dump := getattr(value, "model_dump", None)
    ):  # pydantic, without importing it
        return dict(dump())
    return None


def _clean(value: Any, where: str) -> Any:
    """What JSON can hold, or _Refused with the path of what it cannot. Sets are sorted: their order
    changes with every process.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        if not math.isfinite(value):
            raise _Refused(f"field {where!r} is {value}, which JSON cannot hold; use None")
        return value
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise _Refused(f"field {where!r} is {value}, which is no number; use None")
        return value
    if isinstance(value, (list, tuple)):
        return [_clean(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return sorted((_clean(v, where) for v in value), key=_canonical)
    if kind.__module__ == "penstock.authoring.selectors":
        raise _Refused(f"field {where!r} is a {kind.__name__}; add .get() or .getall()")
    inner = _as_dict(value)
    if inner is None:
        return value  # dates, UUIDs, enums: msgspec knows them, or says that it does not
    for name in inner:
        if type(name) is not str:
            raise _Refused(f"field {where!r} has the key {name!r}; keys are strings")
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
        raise _Refused(f"{what} a {type(value).__name__}, which cannot be a key")
    text = "" if value is None else str(value)
    if not text.strip():
        raise _EmptyKey(
            f"empty key: {what} {'missing' if missing else 'None' if value is None else 'empty'} in a record of {extractor.name}"
        )
    if len(text) > MAX_KEY or (not text.isascii() and _broken(text)):
        raise _Refused(
            f"{what} no usable key: {'longer than ' + str(MAX_KEY) if len(text) > MAX_KEY else 'not text'}"
        )
    return text


# -- saying what went wrong ------------------------------------------------------------------------


def _too_much(out: Extracted, max_output: int) -> str:
    if len(out.records) > MAX_RECORDS:
        return f"more than {MAX_RECORDS} records from one page; yield them from several pages"
    if len(out.links) > MAX_LINKS:
        return f"more than {MAX_LINKS} links from one page; narrow the selector of follow()"
    return f"more than {max_output} bytes of output from one page"


def _broken(value: Any) -> bool:
    return _fails(value, UnicodeEncodeError)


def _culprit(fields: dict[str, Any]) -> str:
    return next((name for name, value in fields.items() if _fails(value, Exception)), "?")


def _fails(value: Any, how: type[Exception]) -> bool:
    try:
        _encode(value)
    except how:
        return True
    except Exception:
        return False
    return False


def _article(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _brief(error: BaseException) -> str:
    if isinstance(error, PenstockError):
        return error.message
    said = _quietly(lambda: str(error)) or _quietly(lambda: repr(error.args))
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _quietly(say: Callable[[], str]) -> str:
    try:
        return say()
    except Exception:
        return ""  # an exception whose own __str__ fails is still only the page's fault


def _line(text: str) -> str:
    one = " ".join(text.encode("utf-8", "replace").decode().split())
    return one if len(one) <= 500 else one[:499] + "…"


def _trace(error: BaseException) -> str:
    """The traceback, without our own frames: the user's line comes last."""
    try:
        shown = traceback.TracebackException(type(error), error, error.__traceback__, limit=-40)
        link: traceback.TracebackException | None = shown
        while link is not None:
            link.stack = traceback.StackSummary.from_list(
                [f for f in link.stack if f.filename not in _OURS] or link.stack
            )
            link = link.__cause__ or link.__context__
        text = "".join(shown.format())
    except Exception:  # the same: an exception that cannot even be shown
        text = type(error).__name__
    return text.encode("utf-8", "replace").decode()[-MAX_DETAIL:]
