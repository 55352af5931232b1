"""Extraction in the worker's own process: the sandbox's port without its isolation. Also how one
page and one change are run, wherever they run.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Sequence

import msgspec

from penstock.authoring.page import Page
from penstock.authoring.pipeline import Change, Pipeline
from penstock.extraction import run as extracting
from penstock.model import ErrorClass
from penstock.ports import Extracted, FetchedPage

# pages in a row: the parser's caches stay warm, and the loop waits a few milliseconds at most
GROUP = 32
_decode_change = msgspec.msgpack.Decoder(Change).decode


def failed(e: BaseException, kind: ErrorClass) -> Extracted:
    line = " ".join(f"{type(e).__name__}: {_text(e)}".split())
    return Extracted(
        error=printable(line.removesuffix(":")[:500]),
        kind=kind,
        detail=printable("".join(traceback.format_exception(e))),
    )


def printable(text: str) -> str:
    """Without the lone surrogates that no encoding takes."""
    return text.encode("utf-8", "replace").decode()


def _text(e: BaseException) -> str:
    try:
        return str(e)
    except BaseException as broken:  # an exception of the user's, whose __str__ is broken too
        return f"<its message cannot be had: {type(broken).__name__}>"


def run_page(pipeline: Pipeline, page: Page, max_output: int = extracting.MAX_OUTPUT) -> Extracted:
    """`MemoryError` and `SystemExit` go through: they say something about the process, and it
    depends on that what they mean.
    """
    try:
        return extracting.run(pipeline, page, max_output=max_output)
    except (MemoryError, SystemExit):
        raise
    except BaseException as e:  # KeyboardInterrupt, CancelledError and the like, raised by the user's code: errors of this page
        return failed(e, ErrorClass.PERMANENT)


async def run_hooks(pipeline: Pipeline, change: bytes) -> str:
    """Every hook that wants it sees the change, whatever the others did; one line says what was
    raised.
    """
    errors = []
    decoded = _decode_change(change)
    for hook in pipeline.hooks:
        if not hook.wants(decoded):
            continue
        try:
            said = hook.fn(decoded)
            if inspect.isawaitable(said):
                await said
        except (MemoryError, SystemExit):
            raise
        except BaseException as e:
            task = asyncio.current_task()
            if isinstance(e, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # we are cancelled, it was not the hook's idea
            errors.append(
                f"{getattr(hook.fn, '__name__', 'hook')}: {failed(e, ErrorClass.PERMANENT).error}"
            )
    return "; ".join(errors)


class InProcess:
    """For tests, debuggers and trusted pipelines: quickest, but a page that ends the process ends
    the worker.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def extract(
        self, pages: Sequence[FetchedPage], *, alone: bool = False
    ) -> Sequence[Extracted]:
        results = []
        for i, fetched in enumerate(pages, 1):
            page = Page.received(
                fetched.url,
                fetched.body,
                fetched.status,
                fetched.headers,
                fetched.fetched_at,
                fetched.event,
                fetched.requested_url,
            )
            try:
                results.append(run_page(self._pipeline, page))
            except (MemoryError, SystemExit) as e:
                results.append(failed(e, ErrorClass.POISON))
            page.forget()
            if alone or i % GROUP == 0:
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
