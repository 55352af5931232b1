"""`api+https://…`: an event for every new or changed item of a paged JSON or CSV endpoint.

See `api_parser` for how a result page is parsed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from hashlib import blake2b
from itertools import islice
from typing import Any, ParamSpec, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec

from penstock.authoring.pipeline import SourceSpec
from penstock.errors import ConfigError, SourceDown
from penstock.model import Failure, mint
from penstock.ports import Batch, Finding, Response
from penstock.rules.identity import BadUrl, canonical_url, origin
from penstock.rules.masking import mask
from penstock.sources.api_parser import ApiError, ItemFormat, Page, next_link
from penstock.sources.base import BATCH, SourceContext, options
from penstock.sources.parser_thread import in_parser_thread
from penstock.sources.polling import (
    Polling,
    SeenVersions,
    StoredVersions,
    headers_of,
    integer,
    one_of,
    pack,
    short_hash,
    target,
    unpack,
    validators,
)

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("penstock.sources")
DEFAULT_INTERVAL = 300.0  # seconds between two rounds
ACCEPT = "application/json, text/csv;q=0.9, */*;q=0.5"


class _State(msgspec.Struct, array_like=True):
    version: int = 1
    # Result pages of the last round. The validators are used only if there was a single page.
    pages: int = 0
    etag: str | None = None
    modified: str | None = None
    memory: StoredVersions = StoredVersions()


class ApiSource(Polling):
    def __init__(self, spec: SourceSpec, context: SourceContext) -> None:
        super().__init__(spec, context, every=DEFAULT_INTERVAL)
        known: dict[str, Any] = {
            "format": None,
            "items": "@",
            "key": None,
            "headers": {},
            "ignore": [],
            "next": None,
            "page": None,
            "offset": None,
            "cursor": {},
            "start": None,
            "delimiter": None,
            "first": "all",
            "max_pages": 1000,
            "max_items": 200_000,
        }
        given = options(spec, known)
        self._url = target(spec, "api")
        self._headers = {"accept": ACCEPT, **headers_of(spec, given["headers"])}
        self._first: str = one_of(spec, "first", given["first"], ("all", "none"))
        self._max_pages = integer(spec, "max_pages", given["max_pages"], 1, 100_000)
        self._max_items = integer(spec, "max_items", given["max_items"], 1, 1_000_000)
        self._paging = _Paging(spec, given)
        if not all(isinstance(path, str) and path for path in given["ignore"]):
            raise ConfigError(
                f"source {spec.name}: ignore is {given['ignore']!r}",
                hint='for example ignore = ["views", "meta.updated"]',
            )
        if given["delimiter"] is not None and (
            not isinstance(given["delimiter"], str) or len(given["delimiter"]) != 1
        ):
            raise ConfigError(
                f"source {spec.name}: delimiter is {given['delimiter']!r}",
                hint='use one character, such as ";"',
            )
        self._format = ItemFormat(
            spec,
            format=None
            if given["format"] is None
            else one_of(spec, "format", given["format"], ("json", "csv")),
            items=given["items"],
            key=given["key"],
            ignore=given["ignore"],
            next=self._paging.expression,
            delimiter=given["delimiter"],
        )

    async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        """Read all result pages once. The last batch has the cursor.

        The ids depend on the cursor at the start. So an interrupted round is repeated with the same
        ids, and reports no change twice.
        """
        state = await in_parser_thread(unpack, cursor, _State) or _State()
        seen_versions = await in_parser_thread(SeenVersions, state.memory, self._max_items)
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
                    break  # some endpoints answer 404 after the last page
                raise
            if response.status == 304:
                yield Batch(idle=True)
                return
            if (body := blake2b(response.body, digest_size=8).digest()) in seen:
                # With page numbers or offsets this is normal: the endpoint repeats the last page,
                # or ignores the parameter.
                if not self._paging.counts:
                    log.warning(
                        "source %s: %s repeats an earlier page, so reading stops there",
                        self.name,
                        mask(url),
                    )
                break
            seen.add(body)
            page = await self._parsed(
                url, self._format.page, response.body, response.headers.get("content-type")
            )
            pages, before = pages + 1, items
            while True:
                made, found = await self._parsed(
                    url, self._new_findings, page, seen_versions, response.url
                )
                items += made
                yield Batch(findings=[] if silent else found)
                if made < BATCH or items >= self._max_items:
                    break
            if pages == 1:
                etag, modified = validators(response)
            following = self._paging.next(
                self._url, url, response, page.next, pages=pages, items=items, last=items == before
            )
            if following is not None and (pages >= self._max_pages or items >= self._max_items):
                log.warning(
                    "source %s: more than %d pages or %d items, so the rest is not read",
                    self.name,
                    self._max_pages,
                    self._max_items,
                )
                break
            url = following
        if seen_versions.repeated:
            log.warning(
                "source %s: skipped %d items that have the same key as another item of this round",
                self.name,
                seen_versions.repeated,
            )
        packed = await in_parser_thread(
            pack, _State(1, pages, etag, modified, seen_versions.stored())
        )
        yield Batch(cursor=packed if packed != cursor else None, idle=True)

    async def _get(self, url: str, known: _State) -> Response:
        """Request a page. The configured headers are sent only to the endpoint's own origin.

        They may contain credentials, and the next page may be on another origin.
        """
        headers = self._headers if origin(url) == origin(self._url) else {"accept": ACCEPT}
        return await self.context.web.get(
            url, etag=known.etag, last_modified=known.modified, headers=headers
        )

    async def _parsed(self, url: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` on a page in the thread of the parsers. Raises SourceDown."""
        try:
            return await in_parser_thread(work, *args, **kwargs)
        except ApiError as e:
            raise SourceDown(
                f"{mask(url)} is not a page of items: it {e.reason}", hint=e.hint
            ) from None

    def _new_findings(
        self, page: Page, seen_versions: SeenVersions, base: str
    ) -> tuple[int, list[Finding]]:
        """Read up to `BATCH` items. Return their number, and the findings of those that changed."""
        items = list(islice(page.items, BATCH))
        found = []
        for item in items:
            id_parts = seen_versions.observe(item.key, short_hash(item.hash))
            if id_parts is None:
                continue
            url = item.payload.get("url")
            found.append(
                Finding(
                    id=mint("api", self._url, item.key, item.hash, *id_parts),
                    url=url if isinstance(url, str) and url else None,
                    base=base,
                    cause=item.key,
                    payload=item.payload,
                    refused=item.refused,
                )
            )
        return len(items), found

    def describe(self, cursor: bytes | None) -> str:
        state = unpack(cursor, _State)
        return "at the start" if state is None else f"{len(state.memory.known) // 16:,} items known"


class _Paging:
    """Finds the URL of the next result page. Without options it uses the Link header."""

    def __init__(self, spec: SourceSpec, given: dict[str, Any]) -> None:
        methods = [name for name in ("next", "page", "offset", "cursor") if given[name]]
        if len(methods) > 1:
            raise ConfigError(
                f"source {spec.name}: {' and '.join(methods)} are different ways to find "
                "the next page",
                hint="set only one of them",
            )
        self._method = methods[0] if methods else "link"
        self._parameter: str = ""
        self.expression: str | None = given["next"]
        if self._method == "cursor":
            configured = given["cursor"]
            if set(configured) != {"param", "from"} or not all(
                isinstance(value, str) and value for value in configured.values()
            ):
                raise ConfigError(
                    f"source {spec.name}: cursor is {configured!r}",
                    hint='for example cursor = {param = "after", from = "meta.next_cursor"}',
                )
            self._parameter, self.expression = configured["param"], configured["from"]
        elif self._method in ("page", "offset"):
            self._parameter = given[self._method]
            if not isinstance(self._parameter, str):
                raise ConfigError(
                    f"source {spec.name}: {self._method} is {self._parameter!r}",
                    hint=f'set it to the name of a parameter: {self._method} = "{self._method}"',
                )
        default = 1 if self._method == "page" else 0
        self._start = (
            default if given["start"] is None else integer(spec, "start", given["start"], 0, 10**9)
        )

    @property
    def counts(self) -> bool:
        return self._method in ("page", "offset")

    def first(self, endpoint: str) -> str:
        return (
            _set_parameter(endpoint, self._parameter, str(self._start)) if self.counts else endpoint
        )

    def next(
        self,
        endpoint: str,
        url: str,
        response: Response,
        following: Any,
        *,
        pages: int,
        items: int,
        last: bool,
    ) -> str | None:
        """Return the URL of the next page, or None after the last page.

        `following` is the result of the expression for the next page. `pages` and `items` are the
        numbers read so far in this round. `last` is True if this page had no items. Raises
        SourceDown if the response has an invalid URL.
        """
        if self.counts:
            number = self._start + (pages if self._method == "page" else items)
            return None if last else _set_parameter(endpoint, self._parameter, str(number))
        given = next_link(response.headers) if self._method == "link" else following
        if given is None or given in ("", False):
            return None
        try:
            if self._method == "cursor":
                return _set_parameter(
                    endpoint,
                    self._parameter,
                    given if isinstance(given, str) else msgspec.json.encode(given).decode(),
                )
            if not isinstance(given, str):
                raise BadUrl("not a string")
            return canonical_url(given, response.url)
        except BadUrl as e:
            raise SourceDown(
                f"{mask(url)} has an invalid URL for the next page: {e.reason}",
                hint="set `next` to a JMESPath expression for the URL of the next page",
            ) from None


def _set_parameter(url: str, name: str, value: str) -> str:
    """Return the URL with the query parameter set or replaced."""
    parts = urlsplit(url)
    query = [(n, v) for n, v in parse_qsl(parts.query, keep_blank_values=True) if n != name]
    return canonical_url(urlunsplit(parts._replace(query=urlencode([*query, (name, value)]))))


open_source = ApiSource
