"""Samples of free disk space."""

from __future__ import annotations

from pathlib import Path

from penstock.operate.disk import read_samples, record_sample


def test_a_sample_of_a_deleted_state_directory_does_not_fail(tmp_path: Path) -> None:
    record_sample(tmp_path / "deleted", 100.0)
    record_sample(tmp_path, 100.0)
    assert [sample.at for sample in read_samples(tmp_path)] == [100.0]
