"""A phase of a start that takes long is announced; a short one, or one with a listener, is not."""

import threading

import pytest

from harness.trainer_runs import lines_of_lightning
from lightning_hybrid.strategies.logs import phases
from lightning_hybrid.strategies.logs.phases import phase, phases_reported_to


def test_long_phase_has_lines_at_growing_intervals_and_an_end(monkeypatch):
    monkeypatch.setattr(phases, "_SILENT_SECONDS", 0.01)
    second_line = threading.Event()
    printed = phases.rank_zero_info
    lines = []

    def record(line):
        lines.append(line)
        printed(line)
        if len(lines) == 2:
            second_line.set()

    monkeypatch.setattr(phases, "rank_zero_info", record)
    with phase("searching"):
        assert second_line.wait(30)
    assert lines[:2] == ["searching: 0.01 s so far", "searching: 0.02 s so far"]
    assert lines[-1].startswith("searching: ended after ")
    assert not any(thread.name == "announce-long-phase" for thread in threading.enumerate())


def test_short_phase_has_no_line():
    with lines_of_lightning() as lines, phase("searching"):
        pass
    assert lines == []


def test_phase_ends_with_an_error():
    with pytest.raises(KeyError), phase("searching"):
        raise KeyError
    assert not any(thread.name == "announce-long-phase" for thread in threading.enumerate())


def test_listener_receives_names_in_place_of_lines(monkeypatch):
    monkeypatch.setattr(phases, "_SILENT_SECONDS", 0.0)
    names = []
    with lines_of_lightning() as lines, phases_reported_to(names.append), phase("recording"), phase("searching"):
        pass
    assert names == ["recording", "searching"] and lines == []
