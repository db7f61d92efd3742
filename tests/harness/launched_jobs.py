"""Multi-process jobs, started as from a shell."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CLUSTER = TESTS.parent / "examples" / "cluster"  # scripts that start several nodes


def environment():
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "LIGHTNING_", "SLURM_"))}
    paths = [str(TESTS), str(TESTS.parent), kept.get("PYTHONPATH", "")]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def start(command):
    # A new session: processes that a failed job leaves are ended with it.
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def run(command, timeout=150):
    """Exit code, output and seconds of a job that must end by itself."""
    began = time.monotonic()
    process = start(command)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        pytest.fail(f"the job still ran after {timeout} s:\n{output[-4000:]}")
    return process.returncode, output, time.monotonic() - began


def torchrun(script, *options):
    return [sys.executable, "-m", "torch.distributed.run", *options, script]


def results_of(output):
    """The losses that `train.py` of the cluster scripts prints, by rank and node."""
    lines = re.findall(r"rank (\d) on node (\d): loss ([\d.]+)", output)
    return {(rank, node): loss for rank, node, loss in lines}
