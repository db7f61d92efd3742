"""The example that measures the memory of ZeRO-3 and offload runs at small size."""

import re
import sys
from pathlib import Path

import pytest

from harness.launched_jobs import run

SCRIPT = Path(__file__).parents[2] / "examples" / "zero3_offload.py"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_memory_of_ranks_is_measured_under_three_layouts(tmp_path):
    command = [sys.executable, str(SCRIPT), "--width", "512", "--layers", "4", "--steps", "3", "--out", str(tmp_path)]
    code, output, _ = run(command, timeout=900)
    assert code == 0, output[-4000:]
    megabytes = int(re.search(r"parameters: (\d+) MB", output)[1])
    rows = re.findall(r"^(replicas|ZeRO-3|ZeRO-3, offload) +(\d+) +(\d+) +[\d.]+ +([\d.]+)$", output, re.MULTILINE)
    assert [name for name, *_ in rows] == ["replicas", "ZeRO-3", "ZeRO-3, offload"], output
    (_, replicas, *_), (_, sharded, *_), (_, offloaded, *_) = rows
    # Parameters, gradients and two states: 4 per rank, 2 where two ranks share them, 1/2 where only gradients stay.
    assert int(replicas) - int(sharded) > 1.5 * megabytes, output
    assert int(sharded) - int(offloaded) > megabytes, output
    assert len({loss for *_, loss in rows}) == 1, output
    assert len(list(tmp_path.glob("*/last.ckpt/manifest.json"))) == 3
