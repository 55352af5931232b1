"""The conformance suites of stores find mistakes: each test here plants one in a SQLite adapter."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import unittest
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from tests.embedded import test_segment_pages, test_sqlite_claims, test_sqlite_ledger

from penstock.errors import PenstockError
from penstock.pages import segments
from penstock.testing.clock import ManualClock

LEDGER = test_sqlite_ledger.TestSqliteLedger
CLAIMS = test_sqlite_claims.TestSqliteClaims
PAGES = test_segment_pages.TestSegmentPages


def plant(monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str) -> None:
    """Replace a part of a module's source, in the functions that are loaded."""
    module = importlib.import_module(name)
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{name} has {old!r} {source.count(old)} times"
    space: dict[str, Any] = {"__name__": name}
    exec(compile(source.replace(old, new), name, "exec"), space)  # noqa: S102 (our own source)
    for key, value in space.items():
        if isinstance(value, str) and not key.startswith("__"):
            monkeypatch.setattr(module, key, value)
        elif getattr(value, "__module__", "") == name:
            replace_code(monkeypatch, vars(module)[key], value)


def replace_code(monkeypatch: pytest.MonkeyPatch, ours: Any, planted: Any) -> None:
    """Let a loaded function, or the methods of a class, run the planted code."""
    if isinstance(planted, FunctionType) and planted.__closure__ is None:
        monkeypatch.setattr(ours, "__code__", planted.__code__)
    elif isinstance(planted, type):
        for method, function in vars(planted).items():
            if isinstance(function, FunctionType):
                replace_code(monkeypatch, vars(ours)[method], function)


def fails(suite: type[Any], test: str, directory: Path) -> bool:
    """Run one test of a suite. Return True if it fails."""
    directory.mkdir()
    rig = suite()
    rig.clock, rig.directory = ManualClock(), directory
    with contextlib.suppress(unittest.SkipTest):
        try:
            getattr(rig, test)()
        except (AssertionError, PenstockError):
            return True
    return False


@pytest.mark.parametrize(
    ("suite", "module", "old", "new", "test"),
    [
        pytest.param(
            LEDGER,
            "penstock.ledgers.sql.budgets",
            "used=budget.used+excluded.used",
            "used=excluded.used",
            "test_a_charge_returns_the_amount_that_was_used_before",
            id="a budget forgets what was used",
        ),
        pytest.param(
            LEDGER,
            "penstock.ledgers.sql.budgets",
            "e.waits_for=? || b.what)",
            "e.waits_for=? || b.period)",
            "test_unchanged_budgets_are_pruned_except_those_that_events_wait_for",
            id="the budget of a waiting event is pruned",
        ),
        pytest.param(
            LEDGER,
            "penstock.ledgers.sql.events",
            '_CURRENT = "n=? AND fence=? AND',
            '_CURRENT = "n=? AND fence>=? AND',
            "test_an_end_with_an_outdated_fence_changes_nothing",
            id="the fence is not checked",
        ),
        pytest.param(
            LEDGER,
            "penstock.ledgers.sql.events",
            "delta[topic, status] -= n",
            "delta[topic, status] -= 0",
            "test_a_random_walk_keeps_counters_and_states_consistent",
            id="a counter is not updated",
        ),
        pytest.param(
            LEDGER,
            "penstock.ledgers.sql.events",
            "status='writing', fence=fence+1,",
            "status='writing',",
            "test_an_end_that_is_repeated_after_a_lost_answer_changes_nothing",
            id="a start that ended as writing keeps its fence",
        ),
        pytest.param(
            LEDGER,
            "penstock.ledgers.sql.events",
            'int(end.outcome == "retry" and end.charged)',
            'int(end.outcome == "retry")',
            "test_only_a_charged_retry_adds_an_attempt",
            id="every retry is charged",
        ),
        pytest.param(
            LEDGER,
            "penstock.ledgers.sql.maintenance",
            "WHERE id=? AND worker=?",
            "WHERE id=? AND worker<>?",
            "test_events_of_a_crashed_worker_are_pending_and_its_ends_change_nothing",
            id="events of the wrong worker are pending",
        ),
        pytest.param(
            LEDGER,
            "penstock.ledgers.sql.maintenance",
            "SELECT n, topic FROM event WHERE status='delayed' AND not_before<=?",
            "SELECT n, topic FROM event WHERE status='delayed' AND not_before<=?+1",
            "test_a_delayed_event_is_pending_when_it_is_due_and_not_before",
            id="a delay ends one second early",
        ),
        pytest.param(
            LEDGER,
            "penstock.ledgers.sql.maintenance",
            'if row[1] in ("success", "duplicate")\n',
            'if row[1] in ("success", "duplicate", "dead")\n',
            "test_pruning_deletes_only_old_ends_and_keeps_the_counters",
            id="retention deletes dead events",
        ),
        pytest.param(
            LEDGER,
            "penstock.ledgers.sql.lookup",
            'if self._tx.execute("SELECT promoted FROM event WHERE id=?", (owner,)).get:',
            "if False:",
            "test_the_oldest_duplicate_of_a_dead_owner_is_promoted_once",
            id="a promoted event has its duplicate promoted",
        ),
        pytest.param(
            LEDGER,
            "penstock.ledgers.sql.outbox",
            "DELETE FROM outbox WHERE sink=? AND n<=?",
            "DELETE FROM outbox WHERE sink=? AND n<?",
            "test_outbox_rows_keep_their_order_and_have_no_gap_after_a_flush",
            id="the last flushed row stays in the outbox",
        ),
        pytest.param(
            LEDGER,
            "penstock.ledgers.sql.links",
            "WHERE n=? AND links=?",
            "WHERE n=? AND links<=?",
            "test_a_chunk_of_links_gets_shorter_and_disappears_with_its_last_link",
            id="a chunk of links that got shorter is used again",
        ),
        pytest.param(
            LEDGER,
            "penstock.ledgers.sql.links",
            "{LINKS_WAITING: links - chunk.links}",
            "{LINKS_WAITING: -chunk.links}",
            "test_a_chunk_of_links_gets_shorter_and_disappears_with_its_last_link",
            id="the counter of waiting links is wrong",
        ),
        pytest.param(
            CLAIMS,
            "penstock.claims.sql",
            "VALUES(?,?,?) ON CONFLICT(url_key) DO NOTHING",
            "VALUES(?,?,?) ON CONFLICT(url_key) DO UPDATE SET owner=excluded.owner",
            "test_a_claim_has_one_owner_and_changes_only_from_the_expected_one",
            id="a claim is taken from its owner",
        ),
        pytest.param(
            CLAIMS,
            "penstock.claims.sql",
            "good=excluded.good, next=NULL,",
            "good=excluded.good,",
            "test_the_next_event_belongs_to_the_current_owner_and_is_cleared_with_it",
            id="the next event outlives its owner",
        ),
        pytest.param(
            CLAIMS,
            "penstock.claims.sql",
            "if after != state:",
            "if n > 3:",
            "test_the_fleet_shares_the_slots_of_a_host_at_its_interval",
            id="small reservations are not recorded",
        ),
        pytest.param(
            CLAIMS,
            "penstock.claims.sql",
            "SELECT host, blocked_until FROM host WHERE slowed=1",
            "SELECT host, blocked_until FROM host WHERE slowed=2",
            "test_retry_after_blocks_the_host_for_the_whole_fleet",
            id="other workers do not see a block",
        ),
        pytest.param(
            CLAIMS,
            "penstock.claims.sql",
            "DELETE FROM claim WHERE url_key>? AND url_key<=? AND at<?",
            "DELETE FROM claim WHERE url_key>? AND url_key<=? AND at<?+1.5",
            "test_pruning_deletes_old_claims_and_keeps_young_ones",
            id="claims expire too early",
        ),
        pytest.param(
            CLAIMS,
            "penstock.rules.freshness",
            "covered = accepted <= claim.began + settle and",
            "covered = accepted < claim.began + settle and",
            "test_events_are_judged_by_the_settle_time_and_the_window_of_the_owner",
            id="the settle time is too short",
        ),
        pytest.param(
            PAGES,
            "penstock.pages.segments",
            "[start : start + size]\n        return",
            "[start : start + size - 1]\n        return",
            "test_stored_bodies_are_returned_unchanged_to_every_worker",
            id="the last byte of a body is lost",
        ),
        pytest.param(
            PAGES,
            "penstock.pages.segments",
            "if hash_ in self._known:",
            "if hash_ in ():",
            "test_storing_a_page_again_does_not_add_bytes",
            id="a page is written twice",
        ),
        pytest.param(
            PAGES,
            "penstock.pages.segments",
            "deleted = [h for h in pages if h not in wanted]",
            "deleted = [h for h in pages]",
            "test_a_needed_page_survives_retention_by_age_and_by_size",
            id="retention deletes needed pages",
        ),
        pytest.param(
            PAGES,
            "penstock.pages.segments",
            "total -= sizes[segment] - left",
            "total -= 2 * sizes[segment]",
            "test_retention_by_size_deletes_the_oldest_pages_until_the_rest_fits",
            id="the size limit is not met",
        ),
        pytest.param(
            PAGES,
            "penstock.pages.segments",
            "return [h for h in staged.again if h not in there]",
            "return []",
            "test_the_index_reports_a_page_that_was_deleted_after_it_was_sent",
            id="a deleted page is not reported",
        ),
        pytest.param(
            PAGES,
            "penstock.pages.common",
            "if page_id(body) != page:",
            "if not page:",
            "test_a_damaged_page_raises_an_error_and_other_pages_are_returned",
            id="a damaged body is returned",
        ),
    ],
)
def test_a_planted_mistake_fails_the_test_of_its_contract(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    suite: type[Any],
    module: str,
    old: str,
    new: str,
    test: str,
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    assert not fails(suite, test, tmp_path / "right")
    plant(monkeypatch, module, old, new)
    assert fails(suite, test, tmp_path / "wrong")
