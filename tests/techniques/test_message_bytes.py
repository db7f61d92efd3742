"""Sizes of the messages of each axis are those of docs/communication.md: elements that a rank passes to collectives."""

import contextlib
from collections import Counter
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.utils.data import DataLoader

from harness.fits import trainer_of
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.shared_memory.collectives import SharedMemory
from lightning_hybrid.shared_memory.transfers import Transfers
from models.cases import Samples, make
from models.hand_written import LENGTH, VOCABULARY, WIDTH
from models.plain_gpt import HEADS, LAYERS, Block, PlainGPT

BATCH = 4
HIDDEN = BATCH * LENGTH * WIDTH  # elements of the hidden states of a batch
COLLECTIVES = {
    "all-reduce": ((ProcessGroup, "allreduce"), (SharedMemory, "all_reduce")),
    "gather": ((ProcessGroup, "_allgather_base"), (ProcessGroup, "all_gather_single"), (SharedMemory, "all_gather")),
    # Over gloo, and through shared memory, a reduce-scatter is one too.
    "exchange": ((ProcessGroup, "alltoall_base"), (ProcessGroup, "all_to_all_single"), (SharedMemory, "exchange")),
    "send": ((Transfers, "send"),),
}
HAS_OUTPUT_FIRST = ("_allgather_base", "all_gather_single", "alltoall_base", "all_to_all_single")


class CausalBlock(Block):
    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).split(width, 2)
        q, k, v = (part.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(PlainGPT):
    block = CausalBlock


class CountsElements(Callback):
    """Elements of floating-point tensors passed to collectives in the second batch, by kind."""

    def __init__(self):
        self.counts = Counter()
        self.patches = contextlib.ExitStack()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for kind, functions in COLLECTIVES.items() if batch_idx == 1 else ():
            for owner, name in functions:
                if hasattr(owner, name):  # torch 2.13 gave some of them new names
                    counted = self.counted(kind, name, getattr(owner, name))
                    self.patches.enter_context(mock.patch.object(owner, name, counted))

    def on_train_batch_end(self, *_):
        self.patches.close()

    def counted(self, kind, name, function):
        def call(*args):
            values = args[2 if name in HAS_OUTPUT_FIRST else 1 :]
            flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
            tensors = (each for each in flat if isinstance(each, torch.Tensor) and each.is_floating_point())
            self.counts[kind] += sum(tensor.numel() for tensor in tensors)
            return function(*args)

        return call


def count(options):
    module, counts = make(GPT), CountsElements()
    loader = DataLoader(Samples("tokens", 4 * BATCH), batch_size=BATCH)
    trainer_of(2, Hybrid3DStrategy(**options), [counts], limit_train_batches=2).fit(module, loader)
    return dict(counts.counts)


def elements_of(module):
    return sum(p.numel() for p in module.parameters())


TOTAL, IN_LAYERS = elements_of(make(GPT)), elements_of(make(GPT).h)
REGIONS = 4 * LAYERS  # two in each layer, forward and backward
ZERO3 = {"zero_stage": 3, "num_microbatches": 2}
CASES = {
    "replicas": ({}, {"all-reduce": TOTAL}),
    "ZeRO-1": ({"zero_stage": 1}, {"exchange": TOTAL, "gather": TOTAL / 2}),
    "ZeRO-3 by step": (ZERO3 | {"reshard_after_forward": False}, {"exchange": TOTAL, "gather": TOTAL / 2}),
    # The head need not be gathered for its backward in one of the microbatches: it is still full.
    "ZeRO-3 by layer": (
        ZERO3 | {"reshard_after_forward": True},
        {"exchange": 2 * TOTAL, "gather": (4 * TOTAL - WIDTH * VOCABULARY) / 2},
    ),
    "stages": ({"pipeline_parallel_size": 2, "num_microbatches": 4}, {"send": HIDDEN}),
    # Beside the regions, the embedding's result and the gradient of the head's input.
    "tensor": ({"tensor_parallel_size": 2}, {"all-reduce": (REGIONS + 2) * HIDDEN}),
    "sequence": (
        {"tensor_parallel_size": 2, "sequence_parallel": True},
        {"exchange": REGIONS * HIDDEN, "gather": (1.5 * REGIONS + 2) * HIDDEN / 2},
    ),
    "context": ({"context_parallel_size": 2}, {"exchange": 8 * LAYERS * HIDDEN / 2, "all-reduce": IN_LAYERS}),
}


@pytest.mark.parametrize("case", CASES)
def test_elements_of_a_step(worlds, case):
    """At most 220 more: flags of gradients, ends of rows, logged numbers, two numbers per position for the loss."""
    options, expected = CASES[case]
    for counts in worlds.run(2, count, options):
        assert {kind: 0 <= counts[kind] - elements <= 220 for kind, elements in expected.items()} == dict.fromkeys(
            expected, True
        ), (counts, expected)
