"""`api+https://…`: an event for every new or changed item of a JSON or CSV endpoint, page after
page. How a page is read is in api_reading.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from hashlib import blake2b
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec

from penstock.authoring.pipeline import SourceSpec
from penstock.errors import ConfigError, SourceDown
from penstock.model import Failure, mint
from penstock.ports import Batch, Finding, Response
from penstock.rules.identity import BadUrl, canonical_url, origin
from penstock.rules.masking import mask
from penstock.sources.api_parser import ApiError, Page, Shape, next_link
from penstock.sources.base import BATCH, SourceContext, options
from penstock.sources.polling import (
    Kept,
    Memory,
    Polling,
    headers_of,
    one_of,
    pack,
    short,
    target,
    unpack,
    whole,
)

log = logging.getLogger("penstock.sources")
EVERY = 300.0
ACCEPT = "application/json, text/csv;q=0.9, */*;q=0.5"


class _State(msgspec.Struct, array_like=True):
    version: int = 1
    pages: int = 0  # of the last look: with one, its validators speak for everything
    etag: str | None = None
    modified: str | None = None
    memory: Kept = Kept()


class ApiSource(Polling):
    def __init__(self, spec: SourceSpec, context: SourceContext) -> None:
        super().__init__(spec, context, every=EVERY)
        known: dict[str, Any] = {
            "format": None, "items": "@", "key": None, "headers": {}, "ignore": [], "next": None, "page": None, "offset": None, "cursor": {}, "start": None,
            "delimiter": None, "first": "all", "max_pages": 1000, "max_items": 200_000,
        }  # fmt: skip
        given = options(spec, known)
        self._url = target(spec, "api")
        self._headers = {"accept": ACCEPT, **headers_of(spec, given["headers"])}
        self._first: str = one_of(spec, "first", given["first"], ("all", "none"))
        self._most_pages = whole(spec, "max_pages", given["max_pages"], 1, 100_000)
        self._most_items = whole(spec, "max_items", given["max_items"], 1, 1_000_000)
        self._paging = _Paging(spec, given)
        if not all(isinstance(path, str) and path for path in given["ignore"]):
            raise ConfigError(
                f"source {spec.name}: ignore is {given['ignore']!r}",
                hint='ignore = ["views", "meta.updated"]',
            )
        if given["delimiter"] is not None and (
            not isinstance(given["delimiter"], str) or len(given["delimiter"]) != 1
        ):
            raise ConfigError(
                f"source {spec.name}: delimiter is {given['delimiter']!r}",
                hint='one character, such as ";"',
            )
        self._shape = Shape(
            spec, format=None if given["format"] is None else one_of(spec, "format", given["format"], ("json", "csv")), items=given["items"],
            key=given["key"], ignore=given["ignore"], next=self._paging.expression, delimiter=given["delimiter"],
        )  # fmt: skip

    async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        """One look at all pages. The position moves at its end; ids follow from the position, so a
        look that was cut off is repeated, not told twice.
        """
        state = (
            await asyncio.to_thread(unpack, cursor, _State) if cursor is not None else None
        ) or _State()
        memory = await asyncio.to_thread(Memory, state.memory, self._most_items)
        silent = not state.pages and self._first == "none"
        url: str | None = self._paging.first(self._url)
        seen: set[bytes] = set()
        pages = items = 0
        while url is not None:
            known = state if not pages and state.pages == 1 else _State()
            try:
                response = await self._get(url, known)
            except Failure as e:
                if e.status == 404 and pages and self._paging.counts:
                    break  # some say so when there are no more
                raise
            if response.status == 304:
                yield Batch(idle=True)
                return
            if (body := blake2b(response.body, digest_size=8).digest()) in seen:
                if (
                    not self._paging.counts
                ):  # those that count show the last page again, or ignore the parameter
                    log.warning(
                        "source %s: %s leads to a page that was there before; the rest is not read",
                        self.name,
                        mask(url),
                    )
                break
            seen.add(body)
            page = await self._page(response, url)
            pages, items = pages + 1, items + len(page.items)
            found = self._news(page, memory, response.url)
            for n in range(0, max(1, len(found)), BATCH):
                yield Batch(findings=[] if silent else found[n : n + BATCH])
            if pages == 1:
                etag, modified = (
                    value if value and len(value) <= 1000 else None
                    for value in map(response.headers.get, ("etag", "last-modified"))
                )
            following = self._paging.next(self._url, url, response, page, items)
            if following is not None and (pages >= self._most_pages or items >= self._most_items):
                log.warning(
                    "source %s: more than %d pages or %d items; the rest is not read",
                    self.name,
                    self._most_pages,
                    self._most_items,
                )
                break
            url = following
        if memory.again:
            log.warning(
                "source %s: %d items have a key that another had in the same look; they were passed over",
                self.name,
                memory.again,
            )
        new = _State(1, pages, etag, modified, memory.kept())
        packed = await asyncio.to_thread(pack, new)
        yield Batch(cursor=packed if packed != cursor else None, idle=True)

    async def _get(self, url: str, known: _State) -> Response:
        """What authorises us goes to the endpoint's own origin and to no other, wherever the next
        page lies.
        """
        headers = self._headers if origin(url) == origin(self._url) else {"accept": ACCEPT}
        return await self.context.web.get(
            url, etag=known.etag, last_modified=known.modified, headers=headers
        )

    async def _page(self, response: Response, url: str) -> Page:
        try:
            return await asyncio.to_thread(
                self._shape.page, response.body, response.headers.get("content-type")
            )
        except ApiError as e:
            raise SourceDown(
                f"{mask(url)} is no page of items: it {e.reason}", hint=e.hint
            ) from None

    def _news(self, page: Page, memory: Memory, base: str) -> list[Finding]:
        found = []
        for item in page.items:
            times = memory.sees(item.key, short(item.hash))
            if times is None:
                continue
            url = item.payload.get("url")
            id_ = mint("api", self._url, item.key, item.hash, *([str(times)] if times else []))
            found.append(
                Finding(
                    id=id_,
                    url=url if isinstance(url, str) and url else None,
                    base=base,
                    cause=item.key,
                    payload=item.payload,
                    refused=item.refused,
                )
            )
        return found

    def describe(self, cursor: bytes | None) -> str:
        state = unpack(cursor, _State) if cursor is not None else None
        return "at the start" if state is None else f"{len(state.memory.known) // 16:,} items known"


class _Paging:
    """How to come from one page to the next; without options, by the Link header."""

    def __init__(self, spec: SourceSpec, given: dict[str, Any]) -> None:
        ways = [name for name in ("next", "page", "offset", "cursor") if given[name]]
        if len(ways) > 1:
            raise ConfigError(
                f"source {spec.name}: {' and '.join(ways)} are two ways to find the next page",
                hint="keep one of them",
            )
        self._way = ways[0] if ways else "link"
        self._parameter: str = ""
        self.expression: str | None = given["next"]
        if self._way == "cursor":
            asked = given["cursor"]
            if set(asked) != {"param", "from"} or not all(
                isinstance(value, str) and value for value in asked.values()
            ):
                raise ConfigError(
                    f"source {spec.name}: cursor is {asked!r}",
                    hint='cursor = {param = "after", from = "meta.next_cursor"}',
                )
            self._parameter, self.expression = asked["param"], asked["from"]
        elif self._way in ("page", "offset"):
            self._parameter = given[self._way]
            if not isinstance(self._parameter, str):
                raise ConfigError(
                    f"source {spec.name}: {self._way} is {self._parameter!r}",
                    hint=f'the name of a parameter: {self._way} = "{self._way}"',
                )
        default = 1 if self._way == "page" else 0
        self._start = (
            default if given["start"] is None else whole(spec, "start", given["start"], 0, 10**9)
        )

    @property
    def counts(self) -> bool:
        return self._way in ("page", "offset")

    def first(self, endpoint: str) -> str:
        return _with(endpoint, self._parameter, str(self._start)) if self.counts else endpoint

    def next(
        self, endpoint: str, url: str, response: Response, page: Page, items: int
    ) -> str | None:
        """None: that was the last. Raises SourceDown for what is no address."""
        if self._way == "page":
            number = int(dict(parse_qsl(urlsplit(url).query)).get(self._parameter, self._start))
            return _with(endpoint, self._parameter, str(number + 1)) if page.items else None
        if self._way == "offset":
            return (
                _with(endpoint, self._parameter, str(self._start + items)) if page.items else None
            )
        given = next_link(response.headers) if self._way == "link" else page.next
        if given is None or given in ("", False):
            return None
        try:
            if self._way == "cursor":
                return _with(
                    endpoint,
                    self._parameter,
                    given if isinstance(given, str) else msgspec.json.encode(given).decode(),
                )
            if not isinstance(given, str):
                raise BadUrl("no text")
            return canonical_url(given, response.url)
        except BadUrl as e:
            raise SourceDown(
                f"{mask(url)} names a next page that is no address: {e.reason}",
                hint="`next` is a JMESPath expression for its URL",
            ) from None


def _with(url: str, name: str, value: str) -> str:
    """The URL with this parameter, in place of the one it has."""
    parts = urlsplit(url)
    query = [(n, v) for n, v in parse_qsl(parts.query, keep_blank_values=True) if n != name]
    return canonical_url(urlunsplit(parts._replace(query=urlencode([*query, (name, value)]))))


def open_source(spec: SourceSpec, context: SourceContext) -> ApiSource:
    return ApiSource(spec, context)
