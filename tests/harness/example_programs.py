"""Runs a program of examples/ in a folder of its own, as a user does."""

import sys
from pathlib import Path

from harness.launched_jobs import run

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(monkeypatch, folder, name, *arguments, timeout=300):
    """Run `python examples/NAME` in `folder`; return its output. It must end well and leave a checkpoint."""
    monkeypatch.chdir(folder)
    code, output, _ = run([sys.executable, str(EXAMPLES / name), *arguments], timeout=timeout)
    assert code == 0, output[-4000:]
    assert list(folder.glob("lightning_logs/version_0/checkpoints/*.ckpt")), "no checkpoint"
    return output
