"""The DDP script before and after: two lines differ, and both reach the same loss."""

import difflib
import re
import sys
from pathlib import Path

import pytest

from harness.launched_jobs import run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "from_ddp"


def difference():
    """The lines after the docstrings that differ, as `diff` has them."""
    before, after = (
        (FOLDER / name).read_text().split('"""\n', 2)[1].splitlines() for name in ("before.py", "after.py")
    )
    lines = difflib.unified_diff(before, after, lineterm="", n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@")) and line != "+"]


def test_two_lines_differ_and_the_documentation_shows_them():
    blocks = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "examples.md").read_text(), re.DOTALL)
    assert difference() in [block.splitlines() for block in blocks]
    assert [line[0] for line in difference()] == ["+", "-", "+"]


@pytest.mark.slow
def test_both_reach_the_same_loss(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    losses = []
    for name in ("before.py", "after.py"):
        code, output, _ = run([sys.executable, str(FOLDER / name)], timeout=300)
        assert code == 0, output[-4000:]
        losses += re.findall(r"validation loss ([\d.]+)", output)
    before, after = map(float, losses)
    assert after == pytest.approx(before, abs=2e-4) and before < 2.2
