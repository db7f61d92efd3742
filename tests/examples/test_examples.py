"""The examples run as their users run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "experts"),
    [
        (["--devices", "1"], "8 experts each"),
        ([], "8 experts, 4 on each of 2 ranks"),
        (["--pipeline", "2"], "8 experts each"),
    ],
    ids=["one process", "two expert ranks", "two stages"],
)
def test_gpt_is_upcycled_and_compared(tmp_path, options, experts):
    small = {"dense-steps": 2, "steps": 3, "width": 16, "layers": 2, "length": 32, "batch": 4, "val-batches": 1}
    arguments = [text for name, value in small.items() for text in (f"--{name}", str(value))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, ROOT / "examples" / "moe.py", *arguments, *options, "--out", tmp_path],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert experts in ran.stdout + ran.stderr, ran.stderr[-2000:]
    rows = re.findall(r"^(dense, continued|upcycled, continued) +3 +([\d,]+) +([\d,]+)", ran.stdout, re.MULTILINE)
    assert [name for name, *_ in rows] == ["dense, continued", "upcycled, continued"]
    (_, dense, dense_active), (_, sparse, sparse_active) = rows
    dense, dense_active, sparse, sparse_active = (
        int(n.replace(",", "")) for n in (dense, dense_active, sparse, sparse_active)
    )
    assert dense == dense_active and sparse > 3 * dense
    assert sparse_active == dense + 2 * 8 * 16  # and the routers
    assert (tmp_path / "expert_load.png").exists()
    assert len(list(tmp_path.glob("lightning_logs/version_*/checkpoints/*.ckpt"))) == 3
