"""Source for seed lists: files, watched directories, prefixes on S3.

See `object_reader` for how one list is read.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import Any, Final

from penstock.authoring.pipeline import SourceSpec
from penstock.config import units
from penstock.config.options import read_option, suggest
from penstock.errors import ConfigError, SourceDown, UsageError
from penstock.ports import Batch, Finding
from penstock.rules.masking import mask
from penstock.sources.base import BATCH, BaseSource, SourceContext, options
from penstock.sources.seeds.files import (
    FORMATS,
    Files,
    ObjectChanged,
    ObjectUnreadable,
    SeedObject,
    SeedPlace,
    format_of,
)
from penstock.sources.seeds.lines import SizeLimits
from penstock.sources.seeds.object_reader import BATCH_BYTES, ObjectReader, ReadOptions
from penstock.sources.seeds.positions import ObjectPosition, ObjectPositions, last_position

DIRECTORY_INTERVAL, PREFIX_INTERVAL = 5.0, 60.0  # seconds between two rounds
# Seconds without a write after which the last line of a file is complete, even without a newline.
QUIET_TIME = 5.0
BATCH_INTERVAL = 1.0  # seconds after which a batch is yielded even if it is not full
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
    """Source that reads each list once, and continues lists that grow.

    If a known name has other content, the list is read from its start.
    """

    def __init__(
        self,
        spec: SourceSpec,
        context: SourceContext,
        place: SeedPlace,
        read_options: ReadOptions,
        *,
        every: float | None,
    ) -> None:
        super().__init__(spec, context)
        self.every = every
        self._place, self._read_options = place, read_options

    async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        positions, before = ObjectPositions(cursor), cursor
        clock = self.context.clock
        seen, failures = await asyncio.to_thread(self._place.scan)
        positions.keep([found.name for found in seen])
        todo = [found for found in seen if not _finished(positions.get(found.name), found)]
        findings: list[Finding] = []
        yielded_at, batch_bytes = clock.now(), 0
        # The second pass reads lists whose last line was incomplete in the first.
        for wait in (QUIET_TIME, 0.0):
            unfinished: set[str] = set()
            bytes_left = sum(found.size for found in todo)
            for found in todo:
                bytes_left -= found.size
                reader = ObjectReader(
                    self._place,
                    found,
                    positions.get(found.name),
                    self._read_options,
                    complete=self._is_complete(positions.get(found.name), found),
                )
                try:
                    while not reader.ended:
                        findings += await asyncio.to_thread(reader.step, BATCH - len(findings))
                        batch_bytes += reader.step_bytes
                        positions.put(found.name, reader.position)
                        if (
                            len(findings) >= BATCH
                            or batch_bytes >= BATCH_BYTES
                            or clock.now() - yielded_at >= BATCH_INTERVAL
                        ):
                            yield Batch(
                                findings=findings,
                                cursor=positions.encode() if findings else None,
                                backlog=bytes_left + reader.bytes_left,
                            )
                            findings, batch_bytes, yielded_at = [], 0, clock.now()
                except ObjectUnreadable as e:
                    failures.append(e)
                except ObjectChanged:
                    if self.every is None:  # without an error there is no next round
                        failures.append(
                            ObjectUnreadable(
                                f"{found.name} was replaced while it was read",
                                hint="it is read again automatically",
                            )
                        )
                    continue
                finally:
                    reader.close()
                if reader.is_incomplete:
                    unfinished.add(found.name)
            if not unfinished or not wait:
                break
            until = clock.now() + wait
            while clock.now() < until:
                after = positions.encode()
                yield Batch(findings=findings, cursor=after if after != before else None)
                findings, batch_bytes, yielded_at, before = [], 0, clock.now(), after
                await clock.sleep(min(BATCH_INTERVAL, until - clock.now()))
            todo = [
                found
                for found in (await asyncio.to_thread(self._place.scan))[0]
                if found.name in unfinished
            ]
        after = positions.encode()
        yield Batch(
            findings=findings,
            cursor=after if after != before or findings else None,
            idle=True,
            backlog=0,
        )
        if failures:
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            raise SourceDown(failures[0].message + more, hint=failures[0].hint, after=self.every)

    def _is_complete(self, position: ObjectPosition | None, found: SeedObject) -> bool:
        """Return whether the list is complete, so that its last line needs no newline.

        That is so if the source reads once, if the object is immutable, or if it has not changed
        for 5 s or since the last round.
        """
        return (
            self.every is None
            or found.version is not None
            or self.context.clock.now() - found.at > QUIET_TIME
            or (position is not None and position.stamp == found.stamp)
        )

    # -- positions ---------------------------------------------------------------------------------

    async def place(self, to: str) -> bytes | None:
        """Return the cursor for `end`, a line of the only list, a list's name or `NAME:LINE`.

        Lists before the named list are marked as read.
        """
        seen, _ = await asyncio.to_thread(self._place.scan)
        names = [found.name for found in seen]
        name, line = "", 1
        if to not in ("end", "now"):
            name, line = _position(to, names)
            if name not in names:
                raise UsageError(
                    f"source {self.name} has no list {name!r}",
                    hint=suggest(name, names, "use start, end, NAME or NAME:LINE"),
                )
        return await asyncio.to_thread(self._cursor_at, seen, name, line)

    def _cursor_at(self, seen: list[SeedObject], name: str, line: int) -> bytes:
        positions = ObjectPositions()
        for found in seen:
            if name and found.name > name:
                break
            last = found.name == name
            if found.version is not None and not last:
                positions.put(
                    found.name,
                    ObjectPosition(found.stamp, offset=found.size, size=found.size, done=True),
                )
                continue
            reader = ObjectReader(
                self._place,
                found,
                None,
                self._read_options,
                complete=True,
                before_line=line if last else None,
            )
            try:
                while not reader.ended and not (last and reader.position.line >= line):
                    reader.step(BATCH)
            except (ObjectUnreadable, ObjectChanged) as e:
                raise UsageError(
                    f"{found.name} cannot be read", hint=getattr(e, "hint", "") or "try again"
                ) from None
            finally:
                reader.close()
            if not last or line > 1:
                positions.put(found.name, reader.position)
        return positions.encode()

    def describe(self, cursor: bytes | None) -> str:
        last = last_position(cursor)
        if not last.name:
            return "at the start"
        others = f", {last.lists} lists in all" if last.lists > 1 else ""
        return f"{'at the end' if last.done else f'before line {last.line}'} of {last.name}{others}"


def _finished(position: ObjectPosition | None, found: SeedObject) -> bool:
    return position is not None and position.done and position.stamp == found.stamp


def _position(to: str, names: list[str]) -> tuple[str, int]:
    if to in names:
        return to, 1
    if to.isdigit() and len(names) == 1:
        return names[0], int(to)
    name, _, line = to.rpartition(":")
    return (name, int(line)) if line.isdigit() else (to, 1)


# -- opening ---------------------------------------------------------------------------------------


def open_source(spec: SourceSpec, context: SourceContext) -> Seeds:
    """Open `seeds:PATH` or `seeds+s3://BUCKET/PREFIX`. Raises ConfigError."""
    given = options(spec, DEFAULTS)
    chosen = _format(spec, given["format"])
    if (
        len(given["delimiter"]) != 1
        or not given["delimiter"].isascii()
        or given["delimiter"] in '"\r\n'
    ):
        raise ConfigError(
            f"source {spec.name}: delimiter is {given['delimiter']!r}",
            hint='use one character, such as ";" or "\\t"',
        )
    if not all(isinstance(column, str) for column in given["columns"]):
        raise ConfigError(
            f"source {spec.name}: columns is not a list of names",
            hint='for example columns = ["url", "sku"]',
        )
    limits = SizeLimits(
        _size(spec, given, "max_line", 1 << 20, 4 << 20),
        _size(spec, given, "max_size", 64 << 30, 1 << 60),
        float(given["max_ratio"]),
    )
    read_options = ReadOptions(
        kind=lambda name: chosen or format_of(name) or ("txt", name.lower().endswith(".gz")),
        limits=limits,
        column=given["column"],
        columns=given["columns"],
        delimiter=given["delimiter"],
        needs_column="url" not in spec.map and spec.hook is None,
    )
    scheme, _, rest = spec.url.partition(":")
    if scheme == "seeds+s3":
        place, default = _bucket(spec, any_name=chosen is not None), PREFIX_INTERVAL
    elif scheme == "seeds" and rest.removeprefix("//"):
        path = os.path.join(context.base, rest.removeprefix("//"))
        place = Files(
            os.path.abspath(path) + (os.sep if path.endswith(os.sep) else ""),
            any_name=chosen is not None,
        )
        default = DIRECTORY_INTERVAL
    else:
        raise ConfigError(f"source {mask(spec.url)!r} is not the URL of a seed list", hint=EXAMPLE)
    every = spec.every if spec.every is not None else default if place.is_directory else None
    return Seeds(spec, context, place, read_options, every=every)


def _format(spec: SourceSpec, text: str) -> tuple[str, bool] | None:
    if not text:
        return None
    name = text.removesuffix(".gz")
    if name not in FORMATS:
        raise ConfigError(
            f"source {spec.name}: there is no format {text!r}",
            hint=f"use {', '.join(FORMATS)}, each also with .gz. "
            "Without `format`, the suffix of the name decides",
        )
    return name, text.endswith(".gz")


def _size(spec: SourceSpec, given: dict[str, Any], name: str, default: int, limit: int) -> int:
    value = default if given[name] is None else given[name]
    size: int = read_option(f"source {spec.name}", name, value, units.sizes(1, limit))
    return size


def _bucket(spec: SourceSpec, *, any_name: bool) -> Any:
    try:
        from penstock.sources.seeds.s3 import Bucket  # needs the extra `s3`
    except ImportError as e:
        raise ConfigError(
            f"seeds on S3 need a package that is not installed: {e.name or e}",
            hint="run pip install 'penstock[s3]'",
        ) from e
    return Bucket(spec.url.removeprefix("seeds+"), any_name=any_name)
