"""A dry run predicts what each rank of a real run holds and sends."""

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from harness.fits import trainer_of
from harness.trainer_runs import ignore_warnings
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks.monitors.count_sent_bytes import SentBytes
from lightning_hybrid.callbacks.monitors.memory_of_tensors import bytes_by_kind, find_holders
from lightning_hybrid.step.deferred_init.parameters_on_meta import parameters_on_meta
from lightning_hybrid.strategies.dry_run.describe_ranks import dry_run
from models.cases import Samples, make
from models.nano_gpt import NanoGPT

BATCH = 8
EXACT = ("parameters", "optimizer_states")
FLAGS = 512  # bytes in flat buffers of gradients
# Bytes beside tensors of the model: losses, logged numbers, and what ranks agree on before a step.
SMALL_MESSAGES = {"pipeline": 2048, "data": 6144, "tensor": 64}


class Measured(Hybrid3DStrategy):
    """Measures what this rank sends in its second step, and holds after it; the first one makes states and buckets."""

    num_steps = 0

    def optimizer_step(self, optimizer, closure, model=None, **kwargs):
        self.num_steps += 1
        if self.num_steps == 1:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        sent = SentBytes(self.layout)
        sent.start()
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        sent.stop()
        holders = find_holders(self.lightning_module, self.optimizers, self.root_device)
        ranks = {axis: dist.get_process_group_ranks(self.mesh.group(axis)) for axis in ("pp", "data", "tp")}
        self.seen = bytes_by_kind(holders), sent.counts, ranks
        return result


def fit(devices, options):
    ignore_warnings()
    strategy = Measured(**options)
    loader = DataLoader(Samples("tokens", 4 * BATCH), batch_size=BATCH)
    trainer_of(devices, strategy, [], max_steps=2).fit(make(NanoGPT), loader)
    return strategy.seen


def predicted(devices, options):
    with parameters_on_meta():
        module = make(NanoGPT)
    loader = DataLoader(Samples("tokens", 4 * BATCH), batch_size=BATCH)
    precision = "64-true" if next(module.parameters()).dtype is torch.float64 else "32-true"
    content = dry_run(
        pl, module, {"train_dataloaders": loader}, devices, options, precision, lambda layout: range(devices)
    )
    assert content["refused"] is None and content["notes"] == []
    return content["rank"]


LAYOUTS = [
    (8, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_microbatches": 4}),
    (4, {"pipeline_parallel_size": 2, "zero_stage": 1, "num_microbatches": 2}),
    (2, {"zero_stage": 3, "reshard_after_forward": True}),
    (2, {"tensor_parallel_size": 2, "recompute": "full"}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("devices", "options"), LAYOUTS, ids=str)
def test_ranks_hold_and_send_what_was_predicted(worlds, devices, options):
    ranks = predicted(devices, options)
    for rank, (held, sent, groups) in zip(ranks, worlds.run(devices, fit, devices, options, timeout=240), strict=True):
        assert {kind: rank["bytes"][kind] for kind in EXACT} == {kind: held[kind] for kind in EXACT}
        assert 0 <= held["gradients"] - rank["bytes"]["gradients"] <= FLAGS
        assert {axis: rank["groups"].get(axis, [rank["rank"]]) for axis in groups} == groups
        for axis, most in SMALL_MESSAGES.items():
            assert 0 <= sent[axis] - rank["sent_bytes"].get(axis, 0) <= most, axis
