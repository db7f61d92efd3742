"""Experts of real width are proved in seconds, and in less memory than their weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
SCRIPT = """
import resource, sys, time
import torch, transformers
from lightning_hybrid.experts.parallel.find import ExpertCalls

name, size, tensor_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
KINDS = {
    "Mixtral": dict(num_experts_per_tok=2),
    "Qwen3Moe": dict(num_experts_per_tok=8, hidden_size=4096, moe_intermediate_size=1536, decoder_sparse_step=1),
    "DeepseekV3": dict(num_experts_per_tok=8, first_k_dense_replace=0),
}


def found(**sizes):
    options = {**KINDS[name], "vocab_size": 8, "num_hidden_layers": 1, **sizes}
    config = getattr(transformers, name + "Config")(**options)
    with torch.device("meta"):
        module = getattr(transformers, name + "ForCausalLM")(config).model.layers[0].mlp
        k = config.num_experts_per_tok
        call = torch.empty(99, config.hidden_size), torch.zeros(99, k, dtype=torch.int64), torch.empty(99, k)
    calls = ExpertCalls()
    calls._calls["experts"] = call, {}
    began = time.process_time()
    result = calls.find(module, size, tensor_size)
    assert result.adapters and bool(result.widths) is (tensor_size > 1), result
    return time.process_time() - began, sum(p.numel() for p in module.experts.parameters())


found(hidden_size=64, intermediate_size=128, moe_intermediate_size=128)  # imports
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seconds, numel = found()
print(seconds, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (4 * numel))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "tensor_size"), [("Mixtral", 8, 1), ("Mixtral", 4, 2), ("Qwen3Moe", 8, 1), ("DeepseekV3", 64, 1)]
)
def test_proof_at_real_width(name, size, tensor_size):
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, name, str(size), str(tensor_size)]
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    cpu_seconds, copies = map(float, done.stdout.split()[-2:])
    print(name, size, tensor_size, cpu_seconds, copies)
    assert cpu_seconds <= 5
    assert copies <= 0.2  # of the weights in float32
