"""Extraction without a sandbox, in the worker's own process.

Also contains `run_page` and `run_hooks`, which the sandboxed children use too.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Sequence

import msgspec

from penstock.authoring.changes import Change
from penstock.authoring.page import Page
from penstock.authoring.pipeline import Pipeline
from penstock.extraction import run as extracting
from penstock.model import ErrorClass
from penstock.ports import Extracted, FetchedPage

# Pages in a row before the event loop runs: the parser's caches stay warm, and the event loop waits
# a few milliseconds at most.
PAGES_PER_YIELD = 32
_decode_change = msgspec.msgpack.Decoder(Change).decode


def failed(e: BaseException, kind: ErrorClass) -> Extracted:
    line = " ".join(f"{type(e).__name__}: {_text(e)}".split())
    return Extracted(
        error=printable(line.removesuffix(":")[:500]),
        kind=kind,
        detail=printable("".join(traceback.format_exception(e))),
    )


def printable(text: str) -> str:
    """Replace lone surrogates, which no encoding accepts."""
    return text.encode("utf-8", "replace").decode()


def _text(e: BaseException) -> str:
    try:
        return str(e)
    except BaseException as broken:  # the __str__ of a user's exception may raise too
        return f"<its message cannot be had: {type(broken).__name__}>"


def run_page(pipeline: Pipeline, page: Page, max_output: int = extracting.MAX_OUTPUT) -> Extracted:
    """Extract one page. Return any exception of user code as the page's error.

    A `MemoryError` or `SystemExit` that `run` does not handle is raised. It concerns the process,
    so the caller decides.
    """
    try:
        return extracting.run(pipeline, page, max_output=max_output).pack_links()
    except (MemoryError, SystemExit):
        raise
    # User code may also raise KeyboardInterrupt, CancelledError and the like: errors of this page.
    except BaseException as e:
        return failed(e, ErrorClass.PERMANENT)


async def run_hooks(pipeline: Pipeline, change: bytes) -> str:
    """Run every hook that wants the change, even if another hook raises.

    Return the exceptions in one line, or "" without exceptions.
    """
    errors = []
    decoded = _decode_change(change)
    for hook in pipeline.hooks:
        if not hook.wants(decoded):
            continue
        try:
            result = hook.fn(decoded)
            if inspect.isawaitable(result):
                await result
        except (MemoryError, SystemExit):
            raise
        except BaseException as e:
            task = asyncio.current_task()
            if isinstance(e, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # this task is cancelled, the hook did not raise it
            errors.append(
                f"{getattr(hook.fn, '__name__', 'hook')}: {failed(e, ErrorClass.PERMANENT).error}"
            )
    return "; ".join(errors)


class InProcess:
    """Extractor for tests, debuggers and trusted pipelines.

    It is the fastest one, but a page that ends the process ends the worker.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def extract(
        self, pages: Sequence[FetchedPage], *, alone: bool = False
    ) -> Sequence[Extracted]:
        results = []
        for i, fetched in enumerate(pages, 1):
            # The fields of FetchedPage are in the order of these parameters.
            page = Page.received(*msgspec.structs.astuple(fetched))
            try:
                results.append(run_page(self._pipeline, page))
            except (MemoryError, SystemExit) as e:
                results.append(failed(e, ErrorClass.POISON))
            page.forget()
            if alone or i % PAGES_PER_YIELD == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        return results

    async def hooks(self, changes: Sequence[bytes]) -> Sequence[str]:
        lines = []
        for change in changes:
            try:
                lines.append(await run_hooks(self._pipeline, change))
            except (MemoryError, SystemExit) as e:
                lines.append(failed(e, ErrorClass.POISON).error)
        return lines

    async def close(self) -> None:
        pass
