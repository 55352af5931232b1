"""The benchmarks run and report the fields that they document. The figures are not tested."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux", reason="the benches pin processes and read /proc: they need Linux"
    ),
    pytest.mark.skipif(
        not os.environ.get("BENCH_SMOKE"),
        reason=(
            "NOT TESTED: BENCH_SMOKE=1 runs the benchmarks (other load on the machine changes "
            "their figures)"
        ),
    ),
]


def bench(tmp_path: Path, *args: str) -> dict[str, Any]:
    """Run a benchmark. Return the JSON object on the last line of its output."""
    env = os.environ | {"BENCH_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "run.py"), *args, "--json"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode == 1 and " is taken (" in done.stderr:
        pytest.skip(
            "NOT TESTED: another benchmark runs on this machine "
            f"({done.stderr.strip().splitlines()[-2]})"
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_claim_reports_costs_ratios_memory_and_that_status_reads_counters(tmp_path: Path) -> None:
    found = bench(
        tmp_path, "claim", "--pending", "2000", "--hosts", "20,1", "--slices", "2", "--seconds", "4"
    )
    assert set(found["cpu_us"]) == set(found["ratio"]) == {"20", "1"}
    for step in ("receive", "admit", "begin", "claim", "conclude"):
        assert found["cpu_us"]["20"][step]["few"] > 0
        assert found["cpu_us"]["20"][step]["many"] > 0
        assert found["ratio"]["20"][step] > 0
    assert found["claim_ratio"] == max(found["ratio"][hosts]["claim"] for hosts in ("20", "1"))
    assert found["within_bar"] == (found["claim_ratio"] <= found["bar"] == 1.5)
    assert found["status"]["reads_counters"]
    assert not {"event", "queue", "message", "history"} & set(found["status"]["scans"])
    assert found["push"]["events_per_second"] > 0
    assert found["worker"]["events"] > 0
    for who in ("push", "worker"):
        assert found[who]["rss_peak_mb"] > 10
        assert found[who]["flat"] is None, "four seconds are too short to judge memory growth"


def test_bytecode_reports_the_bytecodes_of_a_page(tmp_path: Path) -> None:
    found = bench(tmp_path, "bytecode", "--n", "300")
    assert found["bytecodes_per_page"]["this"] > 100
    assert "ratio" not in found, "there is no other checkout to compare with"


def test_slow_host_reports_the_page_rate_with_and_without_a_slow_host(tmp_path: Path) -> None:
    found = bench(
        tmp_path, "slow-host", "--n", "500", "--slow", "300", "--hosts", "10", "--reps", "1"
    )
    assert set(found["pages_per_second"]) == {"alone", "beside"}
    assert found["within_bar"] == (found["ratio"] >= found["bar"] == 0.95)


@pytest.mark.server("postgres")
def test_cdc_reports_the_time_from_a_row_to_its_durable_event(tmp_path: Path) -> None:
    found = bench(tmp_path, "cdc", "--n", "50", "--rate", "50", "--bulk", "2000", "--keep")
    assert 0 < found["commit_to_event"]["p50"] <= found["insert_to_event"]["p95"]
    assert found["bulk_events_per_second"] > 0


def test_webhook_reports_the_time_from_a_signed_request_to_its_durable_event(
    tmp_path: Path,
) -> None:
    found = bench(tmp_path, "webhook", "--rate", "50", "--seconds", "2", "--connections", "8")
    assert found["requests"] == 100
    assert 0 < found["p50_ms"] <= found["p95_ms"] <= found["p99_ms"] <= found["max_ms"]
    assert found["within_bar"] == (found["p95_ms"] < found["bar_ms"] == 500)
    assert found["requests_per_second_flat_out"] > 0


def test_seed_reports_the_time_from_an_insert_to_the_fetch_and_to_the_result_row(
    tmp_path: Path,
) -> None:
    found = bench(tmp_path, "seed", "--n", "40", "--rate", "40")
    for step in ("insert_to_fetch", "insert_to_row"):
        assert 0 < found[step]["p50"] <= found[step]["p95"] <= found[step]["max"]
    assert found["within_bar"] == (
        found["insert_to_fetch"]["p95"] < 1.0 and found["insert_to_row"]["p95"] < 3.0
    )


def test_an_unknown_benchmark_is_an_error_that_lists_the_benchmarks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "run.py"), "speed"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "one of: pages, claim, slow-host" in done.stderr


def test_pages_reports_the_page_rate_of_every_contender_and_the_scaling(tmp_path: Path) -> None:
    if shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin:/usr/local/sbin") is None:
        pytest.skip(
            "NOT TESTED: nginx is not installed, and `bench pages` fetches from it (apt install "
            "nginx)"
        )
    if (os.cpu_count() or 1) < 2:
        pytest.skip("NOT TESTED: `bench pages` needs two cores")
    found = bench(
        tmp_path,
        "pages",
        "--n",
        "200",
        "--reps",
        "1",
        "--only",
        "penstock,worker",
        "--workers",
        "2",
    )  # no peer: nothing to install
    names = {"penstock", "penstock in process", "1 worker, site on its core", "2 workers"}
    assert set(found["pages_per_second"]) == set(found["pss_mb"]) == names
    assert all(rate > 0 for rate in found["pages_per_second"].values())
    assert found["n"]["2 workers"] == 400
    assert found["scaling"] > 0
    assert {"ratio_to_scrapy", "ratio_to_scrapy_in_process"} <= set(found)
