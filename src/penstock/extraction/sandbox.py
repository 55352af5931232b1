"""Extraction in child processes: runs requests, repeats pages after a crash, finds poison pages.

Processes and pipes are handled in `child` and `zygote`.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.extraction import protocol as wire
from penstock.extraction.child import ChildExit, ChildProcess, Limits, Reply
from penstock.extraction.zygote import ZygoteProcess
from penstock.model import ErrorClass, Reason
from penstock.ports import Extracted, FetchedPage
from penstock.rules.reasons import sentence

__all__ = ["Limits", "Sandbox"]

OnEvent = Callable[[str, dict[str, Any]], None]


class Sandbox:
    """Extractor that sends several pages at a time to long-lived children.

    A page is poison only if its child exits while the page runs alone in a fresh child.

    If a child exits early, the results that it returned count. The page in progress is a suspect
    and runs alone. The other pages run again together, once, in a fresh child. If that child exits
    too, they run alone.

    A child that kills the zygote ends all other children too. Then each page that ran alone runs
    once more, under a separate zygote.
    """

    def __init__(
        self,
        pipeline_file: Path | str,
        *,
        size: int = 1,
        limits: Limits | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._file, self._limits = Path(pipeline_file), limits or Limits()
        self._on_event = on_event
        self._permits = asyncio.Semaphore(size)  # waiting requests are served in order of arrival
        self._restarting = asyncio.Lock()
        self._zygote: ZygoteProcess | None = None
        self._separate_zygotes: set[ZygoteProcess] = set()
        self._idle: list[ChildProcess] = []
        self._closed = False

    async def start(self) -> None:
        """Start the zygote. Raise ConfigError if the pipeline file does not load."""
        self._zygote = await ZygoteProcess.start(self._file, self._limits)

    async def close(self) -> None:
        self._closed = True
        self._idle.clear()
        async with self._restarting:
            if self._zygote is not None:
                await self._zygote.close()
        for other in list(self._separate_zygotes):
            await other.close()

    # -- the methods of the port

    async def extract(
        self, pages: Sequence[FetchedPage], *, alone: bool = False
    ) -> Sequence[Extracted]:
        results: dict[int, Extracted] = {}
        todo, suspects = list(range(len(pages))), list[int]()
        fresh = False
        while todo and not alone:
            try:
                reply = await self._request(
                    partial(wire.request, [pages[i] for i in todo]),
                    len(todo),
                    wire.decode_results,
                    fresh=fresh,
                )
            except wire.NotEncodable:
                for i in todo:
                    if reason := wire.encoding_error(pages[i]):
                        results[i] = _not_encodable(reason)
                todo = [i for i in todo if i not in results]
                continue
            finished = len(reply.results)
            results.update(zip(todo, reply.results, strict=False))
            child_exit, todo = reply.exit, todo[finished:]
            if child_exit is None:  # then no page is left
                break
            if child_exit.internal:
                results.update({i: _internal_error(child_exit) for i in todo})
                todo.clear()
                break
            if child_exit.page_index is not None and child_exit.page_index >= finished:
                suspects.append(todo.pop(child_exit.page_index - finished))
            if fresh:
                break
            fresh = True
        last = todo + suspects  # suspects last: a suspect may use its whole time limit again
        alone_results = await asyncio.gather(*[self._extract_alone(pages[i]) for i in last])
        results.update(zip(last, alone_results, strict=True))
        return [results[i] for i in range(len(pages))]

    async def hooks(self, changes: Sequence[bytes]) -> Sequence[str]:
        lines: dict[int, str] = {}
        todo, stalled = list(range(len(changes))), False
        while todo:
            reply = await self._request(
                partial(wire.hook_request, [changes[i] for i in todo]),
                len(todo),
                wire.decode_lines,
                fresh=False,
            )
            finished, child_exit = len(reply.results), reply.exit
            lines.update(zip(todo, reply.results, strict=False))
            todo = todo[finished:]
            if child_exit is None:
                break
            if child_exit.internal:
                lines.update(dict.fromkeys(todo, child_exit.reason))
                break
            # A hook has effects outside, so the change in progress is not repeated. The changes
            # after it have not started.
            if child_exit.page_index == finished or (stalled and not finished):
                was = "was " if child_exit.code is Reason.KILLED else ""
                lines[todo.pop(0)] = f"its hook's process {was}{child_exit.reason}"
            stalled = not finished
        return [lines[i] for i in range(len(changes))]

    # -- children

    async def _request(
        self,
        encode: Callable[[int, mmap.mmap], list[bytes]],
        count: int,
        decode: Callable[[memoryview], list[Any]],
        *,
        fresh: bool,
    ) -> Reply:
        async with self._permits:
            try:
                zygote = await self._running_zygote()
                child = None if fresh else self._idle_child(zygote)
                if child is None:
                    child = zygote.fork()
            except (ConfigError, OSError) as e:
                return _no_child(e)
            try:
                reply = await child.request(encode, count, decode)
            finally:
                if child.usable:
                    if fresh or self._closed:
                        child.discard()
                    else:
                        self._idle.append(child)
            if reply.exit is not None:
                self._emit(
                    "child exited early",
                    reason=reply.exit.reason,
                    pid=child.pid,
                    alone=count == 1 and fresh,
                )
            return reply

    def _idle_child(self, zygote: ZygoteProcess) -> ChildProcess | None:
        while self._idle:
            child = self._idle.pop()
            if child.usable and child.zygote is zygote:
                return child
        return None

    async def _running_zygote(self) -> ZygoteProcess:
        if self._zygote is not None and self._zygote.alive:
            return self._zygote
        async with self._restarting:
            if self._closed:
                raise OSError("the sandbox is closed")
            if self._zygote is None or not self._zygote.alive:
                if self._zygote is not None:
                    await self._zygote.close()
                    self._emit("zygote restarted")
                self._zygote = await ZygoteProcess.start(self._file, self._limits)
            return self._zygote

    async def _extract_alone(self, page: FetchedPage) -> Extracted:
        if reason := wire.encoding_error(page):
            return _not_encodable(reason)
        reply = await self._request(
            partial(wire.request, [page]),
            1,
            wire.decode_results,
            fresh=True,
        )
        if reply.exit is not None and reply.exit.zygote_lost:
            reply = await self._request_with_separate_zygote(page)
        if (child_exit := reply.exit) is None:
            result: Extracted = reply.results[0]
            return result
        if child_exit.internal:
            return _internal_error(child_exit)
        self._emit("page is poison", url=page.url, reason=child_exit.reason)
        return Extracted(
            error=f"{child_exit.reason} while extracted alone",
            code=child_exit.code,
            kind=ErrorClass.POISON,
            detail=child_exit.detail,
        )

    async def _request_with_separate_zygote(self, page: FetchedPage) -> Reply:
        """Run the page under a separate zygote. If this zygote ends, the page is the cause."""
        async with self._permits:
            try:
                zygote = await ZygoteProcess.start(self._file, self._limits)
            except (ConfigError, OSError) as e:
                return _no_child(e)
            self._separate_zygotes.add(zygote)
            try:
                if self._closed:
                    return Reply(
                        [],
                        ChildExit(Reason.SANDBOX_CLOSED, "the sandbox is closed", internal=True),
                    )
                return await zygote.fork().request(
                    partial(wire.request, [page]), 1, wire.decode_results
                )
            finally:
                self._separate_zygotes.discard(zygote)
                await zygote.close()

    def _emit(self, name: str, **fields: Any) -> None:
        if self._on_event is not None:
            self._on_event(name, fields)


def _no_child(e: Exception) -> Reply:
    reason = sentence(Reason.NO_CHILD, detail=e)
    return Reply([], ChildExit(Reason.NO_CHILD, reason, internal=True))


def _internal_error(child_exit: ChildExit) -> Extracted:
    return Extracted(
        error=child_exit.reason,
        code=child_exit.code,
        kind=ErrorClass.OURS,
        detail=child_exit.detail,
    )


def _not_encodable(reason: str) -> Extracted:
    return Extracted(
        error=sentence(Reason.NOT_ENCODABLE, detail=reason),
        code=Reason.NOT_ENCODABLE,
        kind=ErrorClass.PERMANENT,
    )
