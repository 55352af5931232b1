"""`pages`: how many product pages a second one core turns into rows, against the peers, in interleaved repetitions of the same job."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from common import BenchError, cache, machine, median, say, table
from contenders import IN_PROCESS, ISOLATED, SCRAPY, STANDARD, Contender, Job, Result
from target import make_site, mean_size, serving

SERVER_CORE, CLIENT_CORE = 0, 1


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench pages", description=__doc__)
    parser.add_argument("--n", type=int, default=6000, help="pages for the fast contenders (default 6000)")
    parser.add_argument("--peer-n", type=int, default=0, help="pages for the slow ones (default a third of --n)")
    parser.add_argument("--reps", type=int, default=3, help="interleaved repetitions (default 3)")
    parser.add_argument("--only", default="", help="contenders whose name holds one of these, separated by commas")
    parser.add_argument("--tls", action="store_true", help="over TLS")
    parser.add_argument("--gzip", action="store_true", help="the site answers gzipped")
    parser.add_argument("--nice", type=int, default=0, help="priority of site and contender, e.g. -15 as root on a busy machine")
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    o = parser.parse_args(arguments)
    if (os.cpu_count() or 1) < 2:
        raise BenchError("this needs two cores: one for the site, one for the contender", "run it on another machine")
    contenders = [c for c in STANDARD if not o.only or any(part.strip() in c.name for part in o.only.split(","))]
    results = compete(contenders, o)
    print(tell(contenders, results, o))
    if o.json:
        print(json.dumps(summary(contenders, results, o)))
    return 0


def compete(contenders: Sequence[Contender], o: argparse.Namespace) -> dict[str, list[Result]]:
    results: dict[str, list[Result]] = {c.name: [] for c in contenders}
    peer_n = o.peer_n or max(200, o.n // 3)
    site = cache() / "site"
    make_site(site, max(o.n, peer_n))
    say(f"{machine()}; pages of {mean_size(site, o.n) / 1000:.0f} kB on average")
    os.sched_setaffinity(0, {SERVER_CORE})  # the bench itself must not sit on the contender's core
    with serving(cache() / "nginx", site, core=SERVER_CORE, tls=o.tls, compressed=o.gzip, nice=o.nice):
        for rep in range(o.reps):
            for c in contenders:
                job = Job(n=peer_n if c.slow else o.n, cores=frozenset({CLIENT_CORE}), nice=o.nice, tls=o.tls)
                r = c.run(job)
                results[c.name].append(r)
                say(f"{rep + 1}/{o.reps} {c.name}: {r.rate:,.0f} pages/s, {r.cpu_us:,.0f} µs of CPU a page, {r.share:.0%} of the core, {r.pss:.0f} MB")
    return results


def ratios(results: dict[str, list[Result]], name: str) -> list[float]:
    """To Scrapy in the same repetition: what disturbs one disturbs the other."""
    return [mine.rate / scrapy.rate for mine, scrapy in zip(results.get(name, []), results.get(SCRAPY, []), strict=False)]


def cpu_ratios(results: dict[str, list[Result]], name: str) -> list[float]:
    return [scrapy.cpu_us / mine.cpu_us for mine, scrapy in zip(results.get(name, []), results.get(SCRAPY, []), strict=False)]


def tell(contenders: Sequence[Contender], results: dict[str, list[Result]], o: argparse.Namespace) -> str:
    rows = []
    for c in contenders:
        r = results[c.name]
        rates, against, cpu = [x.rate for x in r], ratios(results, c.name), cpu_ratios(results, c.name)
        figures = (f"{median(rates):,.0f}", f"{min(rates):,.0f}-{max(rates):,.0f}", f"{median(against):.2f}" if against else "")
        costs = (f"{median([x.cpu_us for x in r]):,.0f}", f"{median(cpu):.2f}" if cpu else "", f"{median([x.share for x in r]):.0%}")
        rows.append((c.name, r[0].n, *figures, *costs, f"{max(x.pss for x in r):.0f}"))
    head = ("contender", "pages", "pages/s", "min-max", "x scrapy", "CPU µs/page", "x scrapy by CPU", "of the core", "peak PSS MB")
    variant = " over TLS" * o.tls + ", gzipped" * o.gzip
    return f"\nOne core{variant}; medians of {o.reps} interleaved repetitions; ratios within a repetition.\n\n{table(head, rows)}\n"


def summary(contenders: Sequence[Contender], results: dict[str, list[Result]], o: argparse.Namespace) -> dict[str, object]:
    def each(value: str) -> dict[str, float]:
        return {c.name: round(median([getattr(r, value) for r in results[c.name]]), 1) for c in contenders}

    return {
        "bench": "pages",
        "pages_per_second": each("rate"),
        "ratio_to_scrapy": round(median(ratios(results, ISOLATED)), 2),
        "ratio_to_scrapy_in_process": round(median(ratios(results, IN_PROCESS)), 2),
        "cpu_us_per_page": each("cpu_us"),
        "core_share": {c.name: round(median([r.share for r in results[c.name]]), 3) for c in contenders},
        "pss_mb": {c.name: round(max(r.pss for r in results[c.name]), 1) for c in contenders},
        "reps": o.reps,
        "n": {c.name: results[c.name][0].n for c in contenders},
        "tls": o.tls,
        "gzip": o.gzip,
        "machine": machine(),
    }
