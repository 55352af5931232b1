"""Extraction in disposable child processes: who runs where, what is run again, and who is to blame
for a death. Processes and pipes are handled elsewhere.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.extraction import protocol as wire
from penstock.extraction.child import ChildProcess, Death, Limits, Reply
from penstock.extraction.zygote import ZygoteProcess
from penstock.model import ErrorClass
from penstock.ports import Extracted, FetchedPage

__all__ = ["Limits", "Sandbox"]

OnEvent = Callable[[str, dict[str, Any]], None]


class Sandbox:
    """Several pages a hand-over to a child that lives on; but only a death while alone, in a fresh
    child, condemns a page.

    When a child dies, what it had answered counts. The page that was under way is a suspect and
    runs alone; the others run again together, once, in a fresh child, and alone if that dies as
    well. A child that takes the zygote with it takes everyone's: then its page runs once more under
    a zygote of its own.
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
        self._places = asyncio.Semaphore(size)  # first come, first served
        self._restarting = asyncio.Lock()
        self._zygote: ZygoteProcess | None = None
        self._others: set[ZygoteProcess] = set()
        self._idle: list[ChildProcess] = []
        self._closed = False

    async def start(self) -> None:
        """Raises ConfigError where the pipeline file does not load."""
        self._zygote = await ZygoteProcess.start(self._file, self._limits)

    async def close(self) -> None:
        self._closed = True
        self._idle.clear()
        async with self._restarting:
            if self._zygote is not None:
                await self._zygote.close()
        for other in list(self._others):
            await other.close()

    # -- the port

    async def extract(
        self, pages: Sequence[FetchedPage], *, alone: bool = False
    ) -> Sequence[Extracted]:
        results: list[Extracted | None] = [None] * len(pages)
        todo, suspects = list(range(len(pages))), list[int]()
        fresh = False
        while todo and not alone:
            group = [pages[i] for i in todo]
            try:
                reply = await self._ask(
                    lambda token, memory, group=group: wire.request(group, token, memory),  # type: ignore[misc]
                    len(group),
                    wire.decode_results,
                    fresh=fresh,
                )
            except wire.CannotTravel:
                for i in todo:
                    if why := wire.cannot_travel(pages[i]):
                        results[i] = _unfit(why)
                todo = [i for i in todo if results[i] is None]
                continue
            finished = len(reply.results)
            for i, result in zip(todo, reply.results, strict=False):
                results[i] = result
            death, rest = reply.death, todo[finished:]
            todo = []
            if death is None:
                break
            if death.ours:
                for i in rest:
                    results[i] = _ours(death)
                break
            if death.index is not None and death.index >= finished:
                suspects.append(rest.pop(death.index - finished))
            todo = rest
            if fresh:
                break
            fresh = True
        last = todo + suspects  # bystanders first: a suspect may take all its time again
        for i, result in zip(
            last, await asyncio.gather(*[self._alone(pages[i]) for i in last]), strict=True
        ):
            results[i] = result
        return [r for r in results if r is not None]

    async def hooks(self, changes: Sequence[bytes]) -> Sequence[str]:
        lines = [""] * len(changes)
        todo, stalled = list(range(len(changes))), False
        while todo:
            group = [changes[i] for i in todo]
            reply = await self._ask(
                lambda token, _, group=group: wire.hook_request(group, token),  # type: ignore[misc]
                len(group),
                wire.decode_lines,
                fresh=False,
            )
            finished, death = len(reply.results), reply.death
            for i, line in zip(todo, reply.results, strict=False):
                lines[i] = line
            rest = todo[finished:]
            if death is None:
                break
            if death.ours:
                for i in rest:
                    lines[i] = death.reason
                break
            # A hook has effects outside: the change under way is not tried again here, the others
            # have not begun.
            if death.index == finished or (stalled and not finished):
                lines[rest.pop(0)] = f"its hook's process {_verb(death)}"
            stalled = not finished
            todo = rest
        return lines

    # -- children

    async def _ask(
        self,
        encode: Callable[[int, mmap.mmap], list[bytes]],
        count: int,
        decode: Callable[[memoryview], list[Any]],
        *,
        fresh: bool,
    ) -> Reply:
        async with self._places:
            try:
                zygote = await self._living_zygote()
                child = None if fresh else self._idle_child(zygote)
                if child is None:
                    child = zygote.fork()
            except (ConfigError, OSError) as e:
                return Reply([], Death(f"no child process could be started: {e}", ours=True))
            try:
                reply = await child.ask(encode, count, decode)
            finally:
                if child.usable:
                    if fresh or self._closed:
                        child.discard()
                    else:
                        self._idle.append(child)
            if reply.death is not None:
                self._tell(
                    "child died",
                    reason=reply.death.reason,
                    pid=child.pid,
                    alone=count == 1 and fresh,
                )
            return reply

    def _idle_child(self, zygote: ZygoteProcess) -> ChildProcess | None:
        while self._idle:
            child = self._idle.pop()
            if child.usable and child.belongs_to(zygote):
                return child
        return None

    async def _living_zygote(self) -> ZygoteProcess:
        if self._zygote is not None and self._zygote.alive:
            return self._zygote
        async with self._restarting:
            if self._closed:
                raise OSError("the sandbox is closed")
            if self._zygote is None or not self._zygote.alive:
                if self._zygote is not None:
                    await self._zygote.close()
                    self._tell("zygote restarted")
                self._zygote = await ZygoteProcess.start(self._file, self._limits)
            return self._zygote

    async def _alone(self, page: FetchedPage) -> Extracted:
        if why := wire.cannot_travel(page):
            return _unfit(why)
        reply = await self._ask(
            lambda token, memory: wire.request([page], token, memory),
            1,
            wire.decode_results,
            fresh=True,
        )
        if reply.death is not None and reply.death.collateral:
            reply = await self._with_a_zygote_of_its_own(page)
        if (death := reply.death) is None:
            result: Extracted = reply.results[0]
            return result
        if death.ours:
            return _ours(death)
        self._tell("page condemned", url=page.url, reason=death.reason)
        return Extracted(
            error=f"{death.reason} while extracted alone",
            kind=ErrorClass.POISON,
            detail=death.detail,
        )

    async def _with_a_zygote_of_its_own(self, page: FetchedPage) -> Reply:
        """Whose page killed the zygote that several shared? Here it can only be this one."""
        async with self._places:
            try:
                zygote = await ZygoteProcess.start(self._file, self._limits)
            except (ConfigError, OSError) as e:
                return Reply([], Death(f"no child process could be started: {e}", ours=True))
            self._others.add(zygote)
            try:
                if self._closed:
                    return Reply([], Death("the sandbox is closed", ours=True))
                return await zygote.fork().ask(
                    lambda token, memory: wire.request([page], token, memory),
                    1,
                    wire.decode_results,
                )
            finally:
                self._others.discard(zygote)
                await zygote.close()

    def _tell(self, name: str, **fields: Any) -> None:
        if self._on_event is not None:
            self._on_event(name, fields)


def _ours(death: Death) -> Extracted:
    return Extracted(error=death.reason, kind=ErrorClass.OURS, detail=death.detail)


def _unfit(why: str) -> Extracted:
    return Extracted(
        error=f"this page cannot be handed to its extractor: {why}", kind=ErrorClass.PERMANENT
    )


def _verb(death: Death) -> str:
    return f"was {death.reason}" if death.reason.startswith("killed") else death.reason
