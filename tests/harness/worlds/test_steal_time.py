"""The clock of the worlds' time limits."""

import os
import time

from harness.worlds.steal_time import seconds_without_steal


def stat_of(tmp_path, stolen):
    path = tmp_path / "stat"
    path.write_text(f"cpu  10 20 30 40 50 60 70 {stolen} 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n")
    return path


def test_steal_time_does_not_count(tmp_path):
    ticks = os.sysconf("SC_CLK_TCK") * os.cpu_count()
    before = seconds_without_steal(stat_of(tmp_path, 100))
    after = seconds_without_steal(stat_of(tmp_path, 100 + 30 * ticks))
    assert -30 <= after - before < -29


def test_monotonic_clock_without_steal_time(tmp_path):
    start = time.monotonic()
    assert start <= seconds_without_steal(tmp_path / "missing") <= time.monotonic()
