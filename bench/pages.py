"""`pages`: measures the product pages a second that one core turns into rows, against the peers.

The repetitions of the contenders are interleaved.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from common import BenchError, cache, machine, median, say, stop_server, table
from contenders import (
    ALONE,
    IN_PROCESS,
    ISOLATED,
    ON,
    OTHERS,
    SCRAPY,
    STANDARD,
    Contender,
    Job,
    Result,
    on_brokers,
    scaling,
)
from redis_server import redis_server
from target import make_site, mean_size, serving

SERVER_CORE, CLIENT_CORE = 0, 1


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench pages", description=__doc__)
    parser.add_argument(
        "--n", type=int, default=6000, help="pages for the fast contenders (default 6000)"
    )
    parser.add_argument(
        "--peer-n", type=int, default=0, help="pages for the slow ones (default a third of --n)"
    )
    parser.add_argument("--reps", type=int, default=3, help="interleaved repetitions (default 3)")
    parser.add_argument(
        "--only", default="", help="contenders whose name holds one of these, separated by commas"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="further peers: scrapy-redis, Crawlee, a hand-written aiohttp loop",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="also that many workers on as many cores, against one worker on one",
    )
    parser.add_argument(
        "--brokers",
        default="",
        help="also measure the CPU of a page with these brokers, e.g. redis,kafka",
    )
    parser.add_argument("--tls", action="store_true", help="over TLS")
    parser.add_argument("--gzip", action="store_true", help="the site answers gzipped")
    parser.add_argument(
        "--late",
        action="store_true",
        help="Penstock also reads a link at the end of each page, so that it parses whole pages",
    )
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        help="priority of site and contender, e.g. -15 as root on a busy machine",
    )
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    o = parser.parse_args(arguments)
    if (os.cpu_count() or 1) < 2:
        raise BenchError(
            "this needs two cores: one for the site, one for the contender",
            "run it on another machine",
        )
    if not 1 <= o.workers <= (os.cpu_count() or 1):
        raise BenchError(
            f"--workers {o.workers}: each needs its own core, and there are {os.cpu_count()}"
        )
    contenders = [
        c
        for c in chosen(o)
        if not o.only or any(part.strip() in c.name for part in o.only.split(","))
    ]
    if not contenders:
        raise BenchError(
            f"--only {o.only}: no contender is called so",
            f"of: {', '.join(c.name for c in chosen(o))}",
        )
    try:
        results = compete(contenders, o)
    finally:
        for name in o.brokers.split(","):
            if name:
                stop_server(name)
    print(report(contenders, results, o))
    if o.json:
        print(json.dumps(summary(contenders, results, o)))
    return 0


def chosen(o: argparse.Namespace) -> list[Contender]:
    found = [
        *STANDARD,
        *on_brokers([name for name in o.brokers.split(",") if name]),
        *(OTHERS if o.all else ()),
        *(scaling(o.workers) if o.workers > 1 else ()),
    ]
    if o.all and redis_server() is None:
        say(
            "scrapy-redis is left out: redis-server was not found "
            "(Debian/Ubuntu: sudo apt install redis-server)"
        )
        found = [c for c in found if c.name != "scrapy-redis"]
    if o.tls and not all(c.tls for c in found):
        say("Crawlee is left out: its client does not accept a private certificate")
        found = [c for c in found if c.tls]
    return found


def compete(contenders: Sequence[Contender], o: argparse.Namespace) -> dict[str, list[Result]]:
    results: dict[str, list[Result]] = {c.name: [] for c in contenders}
    peer_n = o.peer_n or max(200, o.n // 3)
    site = cache() / "site"
    make_site(site, max(o.n * max(c.workers for c in contenders), peer_n))
    say(f"{machine()}; pages of {mean_size(site, o.n) / 1000:.0f} kB on average")
    os.sched_setaffinity(0, {SERVER_CORE})  # the bench must not run on the contender's core
    with serving(
        cache() / "nginx", site, core=SERVER_CORE, tls=o.tls, compressed=o.gzip, nice=o.nice
    ) as server:
        for rep in range(o.reps):
            for c in contenders:
                cores = frozenset(range(c.workers)) if c.workers > 1 else frozenset({CLIENT_CORE})
                os.sched_setaffinity(server, cores if c.shares_site_cores else {SERVER_CORE})
                # With a shared core the bench runs on a worker's core, so it samples less often.
                every = 0.2 if c.shares_site_cores else 0.05
                n = peer_n if c.slow else o.n * c.workers  # each worker gets the same number
                r = c.run(
                    Job(
                        n=n,
                        cores=cores,
                        nice=o.nice,
                        tls=o.tls,
                        workers=c.workers,
                        every=every,
                        late=o.late,
                    )
                )
                results[c.name].append(r)
                say(
                    f"{rep + 1}/{o.reps} {c.name}: {r.rate:,.0f} pages/s, {r.cpu_us:,.0f} µs of"
                    f" CPU a page, {r.share:.0%} of a core, {r.pss:.0f} MB"
                )
    return results


def ratios(results: dict[str, list[Result]], name: str) -> list[float]:
    """Return the ratios to Scrapy in the same repetition, in which both are disturbed alike."""
    return [
        mine.rate / scrapy.rate
        for mine, scrapy in zip(results.get(name, []), results.get(SCRAPY, []), strict=False)
    ]


def cpu_ratios(results: dict[str, list[Result]], name: str) -> list[float]:
    return [
        scrapy.cpu_us / mine.cpu_us
        for mine, scrapy in zip(results.get(name, []), results.get(SCRAPY, []), strict=False)
    ]


def scalings(
    contenders: Sequence[Contender], results: dict[str, list[Result]]
) -> tuple[float, float]:
    """Return the speed-up of several workers, by pages a second and by CPU of a page."""
    several = [c for c in contenders if c.workers > 1]
    if not several or ALONE not in results:
        return 0.0, 0.0
    pairs = list(zip(results[several[0].name], results[ALONE], strict=True))
    return median([many.rate / one.rate for many, one in pairs]), median(
        [several[0].workers * one.cpu_us / many.cpu_us for many, one in pairs]
    )


def against_embedded(results: dict[str, list[Result]]) -> dict[str, float]:
    """Return the CPU of a page with a server's broker, as a multiple of the embedded broker's.

    Both are from the same repetition.
    """
    found = {
        name: list(zip(r, results.get(ISOLATED, []), strict=False))
        for name, r in results.items()
        if name.startswith(ON)
    }
    return {
        name.removeprefix(ON): round(
            median([mine.cpu_us / embedded.cpu_us for mine, embedded in pairs]), 2
        )
        for name, pairs in found.items()
    }


def report(
    contenders: Sequence[Contender], results: dict[str, list[Result]], o: argparse.Namespace
) -> str:
    rows = []
    for c in contenders:
        r = results[c.name]
        rates, against, cpu = (
            [x.rate for x in r],
            ratios(results, c.name),
            cpu_ratios(results, c.name),
        )
        figures = (
            f"{median(rates):,.0f}",
            f"{min(rates):,.0f}-{max(rates):,.0f}",
            f"{median(against):.2f}" if against else "",
        )
        costs = (
            f"{median([x.cpu_us for x in r]):,.0f}",
            f"{median(cpu):.2f}" if cpu else "",
            f"{median([x.share for x in r]):.0%}",
        )
        rows.append((c.name, r[0].n, *figures, *costs, f"{max(x.pss for x in r):.0f}"))
    head = (
        "contender",
        "pages",
        "pages/s",
        "min-max",
        "x scrapy",
        "CPU µs/page",
        "x scrapy by CPU",
        "of a core",
        "peak PSS MB",
    )
    variant = " over TLS" * o.tls + ", gzipped" * o.gzip + ", every page parsed to its end" * o.late
    text = (
        f"\nOne core{variant}. Medians of {o.reps} interleaved repetitions, "
        "ratios within a repetition.\n\n"
        f"{table(head, rows)}\n"
    )
    for name, ratio in against_embedded(results).items():
        text += f"\n{name}: {ratio:.2f} times the CPU of the embedded broker\n"
    by_rate, by_cpu = scalings(contenders, results)
    if by_rate:
        text += (
            f"\n{o.workers} workers on {o.workers} cores against one on one, the site on the"
            f" same cores in both: {by_rate:.2f} ({by_cpu:.2f} by CPU)\n"
        )
    return text


def summary(
    contenders: Sequence[Contender], results: dict[str, list[Result]], o: argparse.Namespace
) -> dict[str, object]:
    def each(value: str) -> dict[str, float]:
        return {
            c.name: round(median([getattr(r, value) for r in results[c.name]]), 1)
            for c in contenders
        }

    by_rate, by_cpu = scalings(contenders, results)
    return {
        "bench": "pages",
        "pages_per_second": each("rate"),
        "ratio_to_scrapy": round(median(ratios(results, ISOLATED)), 2),
        "ratio_to_scrapy_in_process": round(median(ratios(results, IN_PROCESS)), 2),
        "cpu_us_per_page": each("cpu_us"),
        **({"cpu_to_embedded": against_embedded(results)} if o.brokers else {}),
        "core_share": {
            c.name: round(median([r.share for r in results[c.name]]), 3) for c in contenders
        },
        "pss_mb": {c.name: round(max(r.pss for r in results[c.name]), 1) for c in contenders},
        **(
            {"scaling": round(by_rate, 2), "scaling_by_cpu": round(by_cpu, 2), "workers": o.workers}
            if by_rate
            else {}
        ),
        "reps": o.reps,
        "n": {c.name: results[c.name][0].n for c in contenders},
        "tls": o.tls,
        "gzip": o.gzip,
        "late": o.late,
        "machine": machine(),
    }
