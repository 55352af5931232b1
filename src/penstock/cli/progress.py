"""A progress bar on stderr for long work. Prints nothing without a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from penstock.cli.output import console

SHOW_AFTER = 0.5  # seconds. Shorter work shows no bar.


@contextlib.contextmanager
def bar(verb: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that sets the number of items that are done."""
    import time

    err = console(stderr=True)
    if not err.is_terminal:
        yield lambda n: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    progress = Progress(
        TextColumn(verb),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
    )
    task = progress.add_task(verb, total=total)
    started, shown = time.monotonic(), False

    def update(done: int) -> None:
        nonlocal shown
        if not shown and time.monotonic() - started > SHOW_AFTER:
            progress.start()
            shown = True
        progress.update(task, completed=done)

    try:
        yield update
    finally:
        if shown:
            progress.stop()
