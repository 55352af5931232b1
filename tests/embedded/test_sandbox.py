"""The sandbox with harmful user code: the poison page is found, other pages succeed, no process
is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.authoring.changes import Change
from penstock.authoring.load import load
from penstock.errors import ConfigError
from penstock.extraction.in_process import InProcess
from penstock.extraction.sandbox import Limits, Sandbox
from penstock.extraction.zygote import ZygoteProcess
from penstock.model import Event
from penstock.ports import Extracted, Extraction, FetchedPage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and clean-up lean on Linux")

SHOP = '''
import asyncio, ctypes, os, signal, subprocess, sys, threading, time
from penstock import Page, Pipeline

shop = Pipeline("shop")
libc = ctypes.CDLL(None)

class Odd(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")

def deep(n):
    return deep(n + 1)

def loop_forever():
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass

def sandbox_descriptors(kind):
    """Yield the sandbox's descriptors in this process."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(kind):
                yield int(fd)
        except OSError:
            pass

def write_garbage():
    for fd in sandbox_descriptors("pipe:"):
        if fd > 2:
            try:
                os.write(fd, b"garbage" * 100)
            except OSError:
                pass

def linger(c_fork):
    """Fork a grandchild in a new session. It keeps all inherited descriptors open."""
    if (libc.fork() if c_fork else os.fork()) == 0:
        libc.setsid()
        time.sleep(600)
        os._exit(0)

def act(what):
    if what == "segfault": ctypes.string_at(0)
    elif what == "loop": loop_forever()
    elif what == "sleep": time.sleep(600)
    elif what == "memory":
        hoard = []
        while True: hoard.append(bytearray(1 << 20))
    elif what == "exit0": os._exit(0)
    elif what == "exit3": os._exit(3)
    elif what == "sysexit": sys.exit(3)
    elif what == "abort": os.abort()
    elif what == "recursion": deep(0)
    elif what == "odd": raise Odd("strange")
    elif what == "interrupt": raise KeyboardInterrupt
    elif what == "mute": raise Mute
    elif what == "value": raise ValueError("plain")
    elif what == "print":
        print("x" * 5_000_000)
        sys.stderr.write("y" * 100_000)
    elif what == "output": return {"big": "z" * (20 << 20)}
    elif what == "surrogate": raise ValueError("half \\ud800 a pair")
    elif what == "close": os.closerange(3, 2000)
    elif what == "closeloop":
        os.closerange(3, 2000)
        loop_forever()
    elif what == "garbage": write_garbage()
    elif what == "fork": os.fork()  # both processes continue
    elif what == "linger": linger(False)
    elif what == "lingerdie":
        linger(True)
        os._exit(7)
    elif what == "unburied":  # the zygote, which reaps this child, is stopped for 1 s
        wake = f"sleep 1; kill -CONT {os.getppid()}"
        subprocess.Popen(["sh", "-c", wake], start_new_session=True)
        os.kill(os.getppid(), signal.SIGSTOP)
        os._exit(3)
    elif what == "thread": threading.Thread(target=time.sleep, args=(600,)).start()
    elif what == "signals":
        for n in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT, signal.SIGCHLD):
            signal.signal(n, lambda *a: None)
        loop_forever()
    elif what == "patricide":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    elif what == "slow": time.sleep(0.15)
    elif what == "read": return {"stolen": len(sys.stdin.read())}
    return {}

@shop.extract
def page(page: Page):
    what = page.url.rsplit("/", 1)[1].partition("?")[0]
    yield {"url": page.url, "size": len(page.body), "pid": os.getpid(),
           "event": page.event.id if page.event else None,
           "header": page.headers.get("x-test"),
           "title": page.css("h1::text").get(), **(act(what) or {})}

async def send(change):
    await asyncio.sleep(0)
    if change.key == "late": raise ValueError("too late")

@shop.on_change(fields=["price"])
def later(change):
    return send(change)

@shop.on_change(fields=["a"])
def notify(change):
    if change.key == "raise": raise ValueError("no mail")
    if change.key == "bad": ctypes.string_at(0)
    if change.key == "exit": sys.exit(4)
    if change.key == "long": loop_forever()
    with open(change.url, "a") as f: f.write(change.key + "\\n")
'''
USUAL = Limits(seconds=20, memory=128 << 20, output=4 << 20)
QUICK = Limits(seconds=2.5, memory=128 << 20, output=4 << 20)  # for pages that use all their time
ENDLESS = ("loop", "sleep", "signals", "closeloop")


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    path = tmp_path / "shop.py"
    path.write_text(SHOP)
    return path


@pytest.fixture(autouse=True)
def _no_process_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert _until(lambda: not processes(tmp_path)), processes(tmp_path)


def processes(mark: Path) -> list[int]:
    """Return all processes with the pipeline's path in their command line.

    These are zygotes, children and their forks.
    """
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if (
                str(mark).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
                and state != "Z"
                and int(pid) != os.getpid()
            ):
                found.append(int(pid))
        except OSError:
            pass
    return found


def _until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def page(
    what: str,
    n: int = 0,
    *,
    body: bytes = b"<h1>Tea</h1>" + b"." * 1000,
    headers: dict[str, str] | None = None,
    event: Event | None = None,
) -> FetchedPage:
    url = f"https://shop.example/{what}?{n}"
    return FetchedPage(url, body, 200, headers or {}, 0.0, event, url)


def run(
    shop: Path,
    use: Callable[[Sandbox], Awaitable[Any]],
    *,
    size: int = 1,
    limits: Limits = USUAL,
    **more: Any,
) -> Any:
    async def main() -> Any:
        sandbox = Sandbox(shop, size=size, limits=limits, **more)
        await sandbox.start()
        try:
            return await asyncio.wait_for(use(sandbox), 60)
        finally:
            await sandbox.close()

    return asyncio.run(main())


def fields(result: Extracted) -> dict[str, Any]:
    assert result.error == ""
    decoded: dict[str, Any] = msgspec.json.decode(result.records[0].fields)
    return decoded


def extract_among_good_pages(shop: Path, what: str, **more: Any) -> Extracted:
    """Extract 32 pages, of which the 12th is `what`, and return the result of the 12th page.

    The other pages and a later batch must succeed.
    """
    pages = [page(what if n == 11 else "fine", n) for n in range(32)]

    async def use(sandbox: Sandbox) -> Extracted:
        results = await sandbox.extract(pages)
        assert len(results) == 32
        for n, result in enumerate(results):
            if n != 11:
                assert fields(result)["url"] == pages[n].url
        again = await sandbox.extract([page("fine", n) for n in range(5)])
        assert [fields(r)["title"] for r in again] == ["Tea"] * 5
        return results[11]

    result: Extracted = run(shop, use, limits=QUICK if what in ENDLESS else USUAL, **more)
    return result


# -- ordinary work ---------------------------------------------------------------------------------


def test_sandbox_and_in_process_implement_the_extraction_port(shop: Path) -> None:
    assert isinstance(Sandbox(shop), Extraction)
    assert isinstance(InProcess(load(shop)), Extraction)


def test_a_page_arrives_unchanged_in_the_child(shop: Path) -> None:
    event = Event(id="e1", url="https://shop.example/fine", key="shop.example", data={"big": 2**90})
    given = [
        page("fine", headers={"x-test": "yes"}, event=event),
        page("fine", body=b""),
        page("fine", body=b"\xff" * 3_000_000),
    ]
    first, empty, large = (fields(r) for r in run(shop, lambda s: s.extract(given)))
    assert (first["event"], first["header"], first["size"], first["title"]) == (
        "e1",
        "yes",
        1012,
        "Tea",
    )
    assert (empty["size"], large["size"]) == (0, 3_000_000)


def test_sandbox_and_in_process_extraction_give_the_same_results(shop: Path) -> None:
    pages = [
        page(what, n)
        for n, what in enumerate(
            ["fine", "value", "recursion", "odd", "mute", "fine", "sysexit", "surrogate"]
        )
    ]
    inside = asyncio.run(InProcess(load(shop)).extract(pages))
    outside = run(shop, lambda s: s.extract(pages))
    assert [(r.error, r.kind, len(r.records)) for r in inside] == [
        (r.error, r.kind, len(r.records)) for r in outside
    ]
    assert [r.error for r in outside if r.error].count("") == 0


def test_extracting_no_pages_returns_an_empty_list(shop: Path) -> None:
    assert run(shop, lambda s: s.extract([])) == []


def test_batches_run_in_at_most_size_children_and_the_rest_wait(shop: Path) -> None:
    async def use(sandbox: Sandbox) -> set[int]:
        groups = await asyncio.gather(*[sandbox.extract([page("slow", n)]) for n in range(6)])
        return {fields(g[0])["pid"] for g in groups}

    assert len(run(shop, use, size=2)) == 2


def test_with_alone_each_page_has_a_new_child(shop: Path) -> None:
    results = run(shop, lambda s: s.extract([page("fine", n) for n in range(4)], alone=True))
    assert len({fields(r)["pid"] for r in results}) == 4


def test_a_child_is_replaced_after_its_page_limit_and_no_page_is_lost(shop: Path) -> None:
    async def use(sandbox: Sandbox) -> list[Any]:
        return [
            fields(r)
            for _ in range(6)
            for r in await sandbox.extract([page("fine", n) for n in range(5)])
        ]

    rows = run(shop, use, limits=Limits(pages=10))
    assert len(rows) == 30
    assert len({row["pid"] for row in rows}) == 3


def test_a_page_that_cannot_be_encoded_fails_alone(shop: Path) -> None:
    results = run(
        shop,
        lambda s: s.extract(
            [page("fine"), page("fine", headers={"x-test": "\ud800"}), page("fine", 2)]
        ),
    )
    assert [bool(r.error) for r in results] == [False, True, False]
    assert "cannot be handed" in results[1].error


def test_a_batch_larger_than_the_pipe_buffer_is_extracted(shop: Path) -> None:
    pages = [page("fine", n, body=b"x" * 700_000) for n in range(24)]
    assert [fields(r)["size"] for r in run(shop, lambda s: s.extract(pages))] == [700_000] * 24


# -- crashed children ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("segfault", "killed by SIGSEGV while extracted alone"),
        ("abort", "killed by SIGABRT while extracted alone"),
        ("exit0", "exited with status 0 while extracted alone"),
        ("exit3", "exited with status 3 while extracted alone"),
        ("loop", "ran longer than 2.5 s while extracted alone"),
        ("sleep", "ran longer than 2.5 s while extracted alone"),
        ("signals", "ran longer than 2.5 s while extracted alone"),
        ("memory", "ran out of memory (limit 128 MiB) while extracted alone"),
        ("close", "closed file descriptors that are not its own while extracted alone"),
        ("closeloop", "closed file descriptors that are not its own while extracted alone"),
        ("garbage", "wrote to the sandbox's own pipe while extracted alone"),
        ("lingerdie", "exited with status 7 while extracted alone"),
        ("unburied", "exited with status 3 while extracted alone"),
    ],
)
def test_a_page_that_ends_its_child_is_poison_and_the_other_pages_succeed(
    shop: Path, what: str, reason: str
) -> None:
    result = extract_among_good_pages(shop, what)
    assert (result.error, result.kind, result.records) == (reason, "poison", [])


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("recursion", "RecursionError: maximum recursion"),
        ("odd", "Odd: strange"),
        ("interrupt", "KeyboardInterrupt"),
        ("sysexit", "SystemExit: 3"),
        ("output", "page: more than 4194304"),
    ],
)
def test_an_exception_is_a_permanent_error_and_the_child_keeps_running(
    shop: Path, what: str, error: str
) -> None:
    crashes: list[str] = []
    result = extract_among_good_pages(shop, what, on_event=lambda name, _: crashes.append(name))
    assert result.error.startswith(error)
    assert (result.kind, crashes) == ("permanent", [])


@pytest.mark.parametrize("what", ["print", "fork", "linger", "thread", "read"])
def test_a_page_that_prints_forks_or_starts_threads_succeeds(shop: Path, what: str) -> None:
    crashes: list[str] = []
    assert (
        fields(extract_among_good_pages(shop, what, on_event=lambda name, _: crashes.append(name)))[
            "title"
        ]
        == "Tea"
    )
    assert crashes == []


@pytest.mark.parametrize("what", ["segfault", "loop", "memory"])
def test_the_detail_of_a_poison_page_names_the_line_of_user_code(shop: Path, what: str) -> None:
    (result,) = run(
        shop,
        lambda s: s.extract([page(what)], alone=True),
        limits=QUICK if what in ENDLESS else USUAL,
    )
    assert "shop.py" in result.detail
    assert " act" in result.detail


def test_processes_started_by_a_crashed_child_are_killed(shop: Path, tmp_path: Path) -> None:
    async def use(sandbox: Sandbox) -> None:
        await sandbox.extract([page("lingerdie", n) for n in range(2)])
        # Only the zygote is left.
        assert await asyncio.to_thread(_until, lambda: len(processes(tmp_path)) == 1), processes(
            tmp_path
        )

    run(shop, use)


def test_processes_started_by_children_are_killed_even_if_the_zygote_is_killed(
    shop: Path, tmp_path: Path
) -> None:
    async def use(sandbox: Sandbox) -> None:
        await sandbox.extract([page("linger")])
        assert len(processes(tmp_path)) == 3  # zygote, child and grandchild
        assert (await sandbox.extract([page("patricide")]))[0].kind == "poison"

    run(shop, use)


def test_a_result_that_waits_for_a_busy_loop_does_not_exceed_the_time_limit(shop: Path) -> None:
    events: list[str] = []

    async def use(sandbox: Sandbox) -> None:
        await sandbox.extract([page("fine")])
        task = asyncio.ensure_future(sandbox.extract([page("fine")]))
        await asyncio.sleep(0)
        time.sleep(2.0)  # noqa: ASYNC251 (blocks the loop on purpose)
        assert fields((await task)[0])["title"] == "Tea"

    run(shop, use, limits=Limits(seconds=1.5), on_event=lambda name, _: events.append(name))
    assert events == []


def test_time_in_which_all_processes_were_stopped_does_not_count(
    shop: Path, tmp_path: Path
) -> None:
    events: list[str] = []

    async def use(sandbox: Sandbox) -> None:
        await sandbox.extract([page("fine")])
        task = asyncio.ensure_future(sandbox.extract([page("slow")]))
        await asyncio.sleep(0.05)
        for pid in processes(tmp_path):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)  # noqa: ASYNC251 (stops this process too)
        for pid in processes(tmp_path):
            os.kill(pid, signal.SIGCONT)
        assert fields((await task)[0])["title"] == "Tea"

    run(shop, use, limits=Limits(seconds=1.5), on_event=lambda name, _: events.append(name))
    assert events == []


@pytest.mark.slow
def test_a_hanging_page_is_killed_even_if_the_loop_is_always_late(shop: Path) -> None:
    async def use(sandbox: Sandbox) -> str:
        task = asyncio.ensure_future(sandbox.extract([page("signals")]))
        while not task.done():
            time.sleep(0.15)  # noqa: ASYNC251 (simulates a busy process)
            await asyncio.sleep(0)
        return (await task)[0].error

    assert "ran longer than 0.5 s" in run(shop, use, limits=Limits(seconds=0.5))


def test_several_poison_pages_in_one_batch_are_all_found(shop: Path) -> None:
    bad = {3: "segfault", 4: "exit3", 17: "memory", 30: "abort"}
    results = run(
        shop, lambda s: s.extract([page(bad.get(n, "fine"), n) for n in range(32)]), size=2
    )
    assert {n: r.kind for n, r in enumerate(results) if r.error} == dict.fromkeys(bad, "poison")


def test_the_time_limit_applies_to_a_page_and_not_to_a_batch(shop: Path) -> None:
    crashes: list[str] = []
    results = run(
        shop,
        lambda s: s.extract([page("slow", n) for n in range(20)]),
        limits=Limits(seconds=2),
        on_event=lambda name, _: crashes.append(name),
    )
    assert [r.error for r in results] == [""] * 20
    assert crashes == []


def test_results_that_were_ready_before_a_crash_are_kept(shop: Path) -> None:
    async def use(sandbox: Sandbox) -> list[int]:
        results = await sandbox.extract(
            [page("slow", 0), page("slow", 1), page("exit3", 2), page("slow", 3)]
        )
        assert results[2].error == "exited with status 3 while extracted alone"
        return [fields(results[n])["pid"] for n in (0, 1, 3)]

    first, second, after = run(shop, use)
    assert first == second != after


def test_a_page_that_kills_the_zygote_is_poison_and_other_batches_succeed(shop: Path) -> None:
    async def use(sandbox: Sandbox) -> None:
        bad, *good = await asyncio.gather(
            *[
                sandbox.extract(
                    [page("patricide" if g == 0 else "slow", n) for n in range(3 if g else 1)]
                )
                for g in range(3)
            ]
        )
        assert bad[0].kind == "poison"
        assert bad[0].error == "the process that starts children died while extracted alone"
        assert [r.error for group in good for r in group] == [""] * 6

    run(shop, use, size=3)


async def kill_zygote(zygote: ZygoteProcess) -> None:
    """Kill the zygote and wait until the sandbox has noticed it."""
    os.kill(zygote.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while zygote.alive:  # noqa: ASYNC110 (there is no event to wait for)
            await asyncio.sleep(0.01)


def test_a_killed_zygote_is_restarted(shop: Path) -> None:
    events: list[str] = []

    async def use(sandbox: Sandbox) -> None:
        await sandbox.extract([page("fine")])
        assert sandbox._zygote is not None
        await kill_zygote(sandbox._zygote)
        assert fields((await sandbox.extract([page("fine")]))[0])["title"] == "Tea"

    run(shop, use, on_event=lambda name, _: events.append(name))
    assert events == ["zygote restarted"]


def test_a_zygote_that_cannot_restart_is_an_outage_and_not_poison(shop: Path) -> None:
    async def use(sandbox: Sandbox) -> None:
        assert sandbox._zygote is not None
        shop.write_text("raise ValueError('edited while running')")
        await kill_zygote(sandbox._zygote)
        results = await sandbox.extract([page("fine", n) for n in range(3)])
        assert [r.kind for r in results] == ["ours"] * 3
        assert "edited while running" in results[0].error

    run(shop, use)


def test_a_cancelled_extraction_frees_its_child(shop: Path) -> None:
    async def use(sandbox: Sandbox) -> None:
        task = asyncio.ensure_future(sandbox.extract([page("sleep")]))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (
            fields((await asyncio.wait_for(sandbox.extract([page("fine")]), 20))[0])["title"]
            == "Tea"
        )

    run(shop, use, limits=Limits())


# -- start and end ---------------------------------------------------------------------------------


def test_a_kill_from_outside_during_the_import_is_retried(shop: Path, tmp_path: Path) -> None:
    shop.write_text(
        "import os, pathlib\n"
        f"if not (mark := pathlib.Path({str(tmp_path / 'mark')!r})).exists():\n    mark.touch()\n"
        f"    os.kill(os.getpid(), 9)\n{SHOP}"
    )
    assert fields(run(shop, lambda s: s.extract([page("fine")]))[0])


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import nosuchmodule", "nosuchmodule"),
        ("x = (", "SyntaxError"),
        ("import sys; sys.exit(1)", "SystemExit"),
        ("import os; os._exit(5)", "importing it ended"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import time; time.sleep(60)", "longer than 3 s"),
    ],
)
def test_a_file_that_does_not_load_is_a_configuration_error(
    tmp_path: Path, source: str, sentence: str
) -> None:
    (tmp_path / "bad.py").write_text(source)

    async def main() -> None:
        await Sandbox(
            tmp_path / "bad.py", limits=Limits(load_seconds=3 if "sleep" in source else 60)
        ).start()

    with pytest.raises(ConfigError, match=sentence):
        asyncio.run(main())


def test_closing_while_pages_run_fails_them_and_leaves_no_process(
    shop: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        sandbox = Sandbox(shop, size=2)
        await sandbox.start()
        tasks = [
            asyncio.ensure_future(sandbox.extract([page(what)]))
            for what in ("loop", "linger", "sleep")
        ]
        assert await asyncio.to_thread(_until, lambda: len(processes(tmp_path)) >= 3)
        await sandbox.close()
        assert processes(tmp_path) == []
        results = [(await t)[0] for t in tasks]
        assert results[0].kind == results[2].kind == "ours"
        assert (await sandbox.extract([page("fine")]))[0].kind == "ours"
        await sandbox.close()

    asyncio.run(main())


def test_a_killed_worker_leaves_no_process(shop: Path, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import asyncio, sys\n"
        "from penstock.ports import FetchedPage\n"
        "from penstock.extraction.sandbox import Sandbox\n"
        "async def extract(s, what):\n"
        "    url = 'https://shop.example/' + what\n"
        "    await s.extract([FetchedPage(url, b'', 200, {}, 0.0, None, url)])\n"
        "async def main():\n"
        f"    s = Sandbox({str(shop)!r}, size=3)\n"
        "    await s.start()\n"
        "    print('up', flush=True)\n"
        "    pages = ('linger', 'loop', 'sleep', 'signals')\n"
        "    await asyncio.gather(*[extract(s, what) for what in pages])\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env=environment
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"up\n"
        # Worker, zygote, at least three children and a grandchild.
        assert _until(lambda: len(processes(tmp_path)) >= 6)
        worker.kill()
    assert _until(lambda: processes(tmp_path) == []), processes(tmp_path)


def test_sigterm_and_sigint_to_all_processes_do_not_stop_a_page(shop: Path, tmp_path: Path) -> None:
    async def use(sandbox: Sandbox) -> None:
        task = asyncio.ensure_future(sandbox.extract([page("slow", n) for n in range(4)]))
        await asyncio.sleep(0.2)
        for pid in processes(tmp_path):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert [r.error for r in await task] == [""] * 4

    events: list[str] = []
    run(shop, use, on_event=lambda name, _: events.append(name))
    assert events == []


def test_output_of_user_code_is_written_to_standard_error(
    shop: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(shop, lambda s: s.extract([page("print")]))
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("x") == 5_000_000


# -- hooks -----------------------------------------------------------------------------------------


def change(key: str, where: Path, field: str = "a") -> bytes:
    return msgspec.msgpack.encode(
        Change(
            event_id="e",
            trace_id="t",
            url=str(where),
            extractor="page",
            key=key,
            old={},
            new={field: 1},
            fields={field: [None, 1]},
        )
    )


def test_each_hook_runs_once_and_a_failing_one_is_an_error_line(shop: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    keys = ["one", "raise", "two", "bad", "three", "long", "four", "exit", "five"]
    lines = run(shop, lambda s: s.hooks([change(k, seen) for k in keys]), limits=QUICK)
    errors = dict(zip(keys, lines, strict=True))
    assert {k for k, line in errors.items() if line} == {"raise", "bad", "long", "exit"}
    assert errors["raise"] == "notify: ValueError: no mail"
    assert "SIGSEGV" in errors["bad"]
    assert "longer than 2.5 s" in errors["long"]
    assert "status 4" in errors["exit"]
    assert seen.read_text().split() == ["one", "two", "three", "four", "five"]


def test_hooks_run_in_process_too(shop: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    lines = asyncio.run(
        InProcess(load(shop)).hooks(
            [change("one", seen), change("raise", seen), change("exit", seen)]
        )
    )
    assert lines == ["", "notify: ValueError: no mail", "SystemExit: 4"]
    assert seen.read_text() == "one\n"


def test_a_hook_may_return_an_awaitable_and_gets_only_changes_of_its_fields(
    shop: Path, tmp_path: Path
) -> None:
    changes = [
        change("late", tmp_path / "seen", "price"),
        change("fine", tmp_path / "seen", "price"),
        change("late", tmp_path / "seen"),
    ]
    expected = ["later: ValueError: too late", "", ""]
    assert run(shop, lambda s: s.hooks(changes)) == expected
    assert asyncio.run(InProcess(load(shop)).hooks(changes)) == expected
    assert (tmp_path / "seen").read_text() == "late\nlate\n"


def test_a_pipeline_file_in_a_folder_with_an_odd_name_loads(tmp_path: Path) -> None:
    folder = tmp_path / 'caf\udce9 "x"'
    folder.mkdir()
    (folder / "shop.py").write_text(SHOP)
    assert fields(run(folder / "shop.py", lambda s: s.extract([page("fine")]))[0])["title"] == "Tea"
