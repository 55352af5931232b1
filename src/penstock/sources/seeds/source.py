"""Seed lists as a source: files, directories that are watched, prefixes on S3. Rounds, batches and
positions; how a list is read is in seeds_reading.py.
"""

from __future__ import annotations

import asyncio
import difflib
import os
from collections.abc import AsyncGenerator
from typing import Any, Final

from penstock.authoring.pipeline import SourceSpec
from penstock.config import units
from penstock.errors import ConfigError, SourceDown, UsageError
from penstock.ports import Batch, Finding
from penstock.rules.masking import mask
from penstock.sources.base import BATCH, BaseSource, SourceContext, options
from penstock.sources.seeds.files import Changed, Files, Found, Place, Unread
from penstock.sources.seeds.formats import FORMATS, format_of
from penstock.sources.seeds.lines import Caps
from penstock.sources.seeds.object_reader import WEIGHT, Manner, Reading
from penstock.sources.seeds.positions import Mark, Marks, last_of

EVERY_DIRECTORY, EVERY_PREFIX = 5.0, 60.0
QUIET = 5.0  # seconds in which nobody wrote to a file: its last line is a line, even without an end
SAY = 1.0  # seconds after which a batch goes out as it is
EXAMPLE = "seeds:urls.txt, seeds:inbox/, seeds:lists/*.csv or seeds+s3://bucket/prefix"
DEFAULTS: Final[dict[str, Any]] = {
    "format": "",
    "column": "url",
    "columns": [],
    "delimiter": ",",
    "max_line": None,
    "max_size": None,
    "max_ratio": 250.0,
}


class Seeds(BaseSource):
    """Same name and same content so far: it is read on. Another content under a known name: it is
    read from its beginning.
    """

    def __init__(
        self,
        spec: SourceSpec,
        context: SourceContext,
        place: Place,
        manner: Manner,
        *,
        every: float | None,
    ) -> None:
        super().__init__(spec, context)
        self.every = every
        self._place, self._manner = place, manner

    async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        marks, before = Marks(cursor), cursor
        clock = self.context.clock
        seen, troubles = await asyncio.to_thread(self._place.scan)
        marks.keep([found.name for found in seen])
        todo = [found for found in seen if not _finished(marks.get(found.name), found)]
        findings: list[Finding] = []
        said, weight = clock.now(), 0
        for patience in (QUIET, 0.0):
            unfinished: set[str] = set()
            left = sum(found.size for found in todo)
            for found in todo:
                left -= found.size
                reading = Reading(
                    self._place,
                    found,
                    marks.get(found.name),
                    self._manner,
                    complete=self._complete(marks.get(found.name), found),
                )
                try:
                    while not reading.ended:
                        findings += await asyncio.to_thread(reading.step, BATCH - len(findings))
                        weight += reading.weight
                        marks.put(found.name, reading.mark)
                        if len(findings) >= BATCH or weight >= WEIGHT or clock.now() - said >= SAY:
                            yield Batch(
                                findings=findings,
                                cursor=marks.encode() if findings else None,
                                backlog=left + reading.left,
                            )
                            findings, weight, said = [], 0, clock.now()
                except Unread as e:
                    troubles.append(e)
                except Changed:
                    if self.every is None:  # there is no next round, unless this one fails
                        troubles.append(
                            Unread(
                                f"{found.name} was replaced while it was read",
                                hint="it is read again",
                            )
                        )
                    continue
                finally:
                    reading.close()
                if reading.waits:
                    unfinished.add(found.name)
            if not unfinished or not patience:
                break
            until = clock.now() + patience
            while clock.now() < until:
                after = marks.encode()
                yield Batch(findings=findings, cursor=after if after != before else None)
                findings, weight, said, before = [], 0, clock.now(), after
                await clock.sleep(min(SAY, until - clock.now()))
            todo = [
                found
                for found in (await asyncio.to_thread(self._place.scan))[0]
                if found.name in unfinished
            ]
        after = marks.encode()
        yield Batch(
            findings=findings,
            cursor=after if after != before or findings else None,
            idle=True,
            backlog=0,
        )
        if troubles:
            more = f" (and {len(troubles) - 1} more)" if len(troubles) > 1 else ""
            raise SourceDown(troubles[0].message + more, hint=troubles[0].hint, after=self.every)

    def _complete(self, mark: Mark | None, found: Found) -> bool:
        """Nobody writes to it now: it is read once, cannot be written to, or has not been since the
        last look.
        """
        if (
            self.every is None
            or found.version is not None
            or self.context.clock.now() - found.at > QUIET
        ):
            return True
        return mark is not None and mark.stamp == found.stamp

    # -- positions ---------------------------------------------------------------------------------

    async def place(self, to: str) -> bytes | None:
        """`end`; a line of the only list; the name of a list; `NAME:LINE`. Lists before the named
        one count as read.
        """
        seen, _ = await asyncio.to_thread(self._place.scan)
        names = [found.name for found in seen]
        name, line = "", 1
        if to not in ("end", "now"):
            name, line = _position(to, names)
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                raise UsageError(
                    f"source {self.name} has no list {name!r}",
                    hint=f"did you mean {near[0]}?" if near else "start, end, NAME or NAME:LINE",
                )
        return await asyncio.to_thread(self._place_marks, seen, name, line)

    def _place_marks(self, seen: list[Found], name: str, line: int) -> bytes:
        marks = Marks()
        for found in seen:
            if name and found.name > name:
                break
            last = found.name == name
            if found.version is not None and not last:
                marks.put(
                    found.name, Mark(found.stamp, offset=found.size, size=found.size, done=True)
                )
                continue
            reading = Reading(
                self._place,
                found,
                None,
                self._manner,
                complete=True,
                before_line=line if last else None,
            )
            try:
                while not reading.ended and not (last and reading.mark.line >= line):
                    reading.step(BATCH)
            except (Unread, Changed) as e:
                raise UsageError(
                    f"{found.name} cannot be read", hint=getattr(e, "hint", "") or "try again"
                ) from None
            finally:
                reading.close()
            if not last or line > 1:
                marks.put(found.name, reading.mark)
        return marks.encode()

    def describe(self, cursor: bytes | None) -> str:
        if cursor is None:
            return "at the start"
        last = last_of(cursor)
        if not last.name:
            return "at the start"
        others = f", {last.lists} lists in all" if last.lists > 1 else ""
        return f"{'at the end' if last.done else f'before line {last.line}'} of {last.name}{others}"


def _finished(mark: Mark | None, found: Found) -> bool:
    return mark is not None and mark.done and mark.stamp == found.stamp


def _position(to: str, names: list[str]) -> tuple[str, int]:
    if to in names:
        return to, 1
    if to.isdigit() and len(names) == 1:
        return names[0], int(to)
    name, _, line = to.rpartition(":")
    return (name, int(line)) if line.isdigit() else (to, 1)


# -- opening ---------------------------------------------------------------------------------------


def open_source(spec: SourceSpec, context: SourceContext) -> Seeds:
    """`seeds:PATH` or `seeds+s3://BUCKET/PREFIX`."""
    given = options(spec, DEFAULTS)
    chosen = _format(spec, given["format"])
    if (
        len(given["delimiter"]) != 1
        or not given["delimiter"].isascii()
        or given["delimiter"] in '"\r\n'
    ):
        raise ConfigError(
            f"source {spec.name}: delimiter is {given['delimiter']!r}",
            hint='one character, such as ";" or "\\t"',
        )
    if not all(isinstance(column, str) for column in given["columns"]):
        raise ConfigError(
            f"source {spec.name}: columns is no list of names", hint='columns = ["url", "sku"]'
        )
    caps = Caps(
        _size(spec, given, "max_line", 1 << 20, 4 << 20),
        _size(spec, given, "max_size", 64 << 30, 1 << 60),
        float(given["max_ratio"]),
    )
    manner = Manner(
        kind=lambda name: chosen or format_of(name) or ("txt", name.lower().endswith(".gz")),
        caps=caps,
        column=given["column"],
        columns=given["columns"],
        delimiter=given["delimiter"],
        needs_column="url" not in spec.map and spec.hook is None,
    )
    scheme, _, rest = spec.url.partition(":")
    if scheme == "seeds+s3":
        place, default = _bucket(spec, any_name=chosen is not None), EVERY_PREFIX
    elif scheme == "seeds" and rest.removeprefix("//"):
        path = os.path.join(context.base, rest.removeprefix("//"))
        place = Files(
            os.path.abspath(path) + (os.sep if path.endswith(os.sep) else ""),
            any_name=chosen is not None,
        )
        default = EVERY_DIRECTORY
    else:
        raise ConfigError(f"source {mask(spec.url)!r} names no seed list", hint=EXAMPLE)
    every = spec.every if spec.every is not None else default if place.is_directory else None
    return Seeds(spec, context, place, manner, every=every)


def _format(spec: SourceSpec, text: str) -> tuple[str, bool] | None:
    if not text:
        return None
    name = text.removesuffix(".gz")
    if name not in FORMATS:
        raise ConfigError(
            f"source {spec.name}: there is no format {text!r}",
            hint=f"{', '.join(FORMATS)}, each also with .gz; else the name's end says it",
        )
    return name, text.endswith(".gz")


def _size(spec: SourceSpec, given: dict[str, Any], name: str, default: int, most: int) -> int:
    try:
        found = default if given[name] is None else units.size(given[name])
    except ValueError:
        found = -1
    if not 1 <= found <= most:
        raise ConfigError(
            f"source {spec.name}: {name} is {given[name]!r}",
            hint=f'at most "{units.write_size(most)}", for example "{units.write_size(default)}"',
        )
    return found


def _bucket(spec: SourceSpec, *, any_name: bool) -> Any:
    try:
        from penstock.sources.seeds.s3 import Bucket  # an extra
    except ImportError as e:
        raise ConfigError(
            f"seeds on S3 need a package that is missing: {e.name or e}",
            hint="pip install 'penstock[s3]'",
        ) from e
    return Bucket(spec.url.removeprefix("seeds+"), any_name=any_name)
