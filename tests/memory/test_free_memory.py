"""What is free on a host whose container has a limit."""

import pytest

from lightning_hybrid.memory import free

V1 = """cache 4096
inactive_file 1024
active_file 2048
total_cache 700000
total_inactive_file 500000
total_active_file 100000
total_unevictable 0"""
V2 = """anon 300000
file 700000
inactive_file 500000
active_file 100000
slab 5"""


@pytest.mark.parametrize("statistics", [V1, V2])
def test_cached_files_of_a_container_are_free(monkeypatch, tmp_path, statistics):
    paths = []
    for name, text in (("limit", "2000000"), ("usage", "1900000"), ("stat", statistics)):
        (tmp_path / name).write_text(text)
        paths.append(str(tmp_path / name))
    monkeypatch.setattr(free, "_LIMITS", (tuple(paths),))
    assert free.free_on_host() == 700_000
    assert free.host_memory() == 2_000_000
