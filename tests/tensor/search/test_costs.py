"""The search for the plan of a layer of real width takes seconds, and less memory than its weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
SCRIPT = """
import resource, sys, time
import torch
from lightning_hybrid.tensor.search.unit import plan_unit
from models.wide_layers import GatedLayer

width, hidden, num_heads, num_kv_heads, size, by = *map(int, sys.argv[1:6]), sys.argv[6] or None
torch.set_num_threads(1)


def search(width, hidden, num_heads, num_kv_heads):
    with torch.device("meta"):
        unit = GatedLayer(width, hidden, num_heads=num_heads, num_kv_heads=num_kv_heads)
    x = torch.randn(1, 128, width, requires_grad=True)
    plan = plan_unit(unit, (x,), {}, size, sequence_parallel=by)
    assert len(plan.groups) == 2 and not plan.notes and (plan.positions is None) is (by is None), plan.lines()
    return sum(parameter.numel() for parameter in unit.parameters())


search(64, 256, 8, 8)  # imports
before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
numel = search(width, hidden, num_heads, num_kv_heads)
seconds = time.process_time() - began
print(seconds, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (4 * numel))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "bound"), [((4096, 14336, 32, 8), 5.0), ((8192, 28672, 64, 8), 15.0)], ids=["Llama 8B", "Llama 70B"]
)
@pytest.mark.parametrize(("size", "sequence_parallel"), [(2, ""), (2, "tensor"), (8, ""), (8, "tensor")])
def test_search_at_real_width(sizes, bound, size, sequence_parallel):
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *map(str, (*sizes, size)), sequence_parallel]
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    cpu_seconds, copies = map(float, done.stdout.split())
    assert cpu_seconds <= bound
    assert copies <= 1.1  # of the layer in float32
