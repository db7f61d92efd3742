"""A dry run predicts what each rank of a real run holds and sends."""

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from harness.fits import trainer_of
from harness.trainer_runs import ignore_warnings
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks.monitors.holders import bytes_by_kind, find_holders
from lightning_hybrid.callbacks.monitors.messages import SentBytes
from lightning_hybrid.planning.dry_run.ranks import dry_run
from lightning_hybrid.step.deferred_init.parameters import parameters_on_meta
from models.cases import Samples, make
from models.mixtures import Mixtral
from models.nano_gpt import NanoGPT
from models.plain_gpt import PlainGPT

BATCH = 8
EXACT = ("parameters", "optimizer_states")
FLAGS = 512  # bytes in flat buffers of gradients
# Bytes beside tensors of the model: losses, logged numbers, and what ranks agree on before a step.
SMALL_MESSAGES = {"pipeline": 2048, "data": 6144, "tensor": 64}


class TokensToExperts:
    """Counts the bytes of all-to-alls over the ranks that share experts, as `SentBytes` does."""

    def __enter__(self):
        self.sent_bytes, self.run = 0.0, dist.all_to_all_single
        dist.all_to_all_single = self.counted
        return self

    def counted(self, output, tensor, *args, group, **kwargs):
        self.sent_bytes += tensor.nbytes * (group.size() - 1) / group.size()
        return self.run(output, tensor, *args, group=group, **kwargs)

    def __exit__(self, *error):
        dist.all_to_all_single = self.run


class Measured(Hybrid3DStrategy):
    """Measures what this rank sends in its second step, and holds after it; the first one makes states and buckets."""

    num_steps = 0

    def optimizer_step(self, optimizer, closure, model=None, **kwargs):
        self.num_steps += 1
        if self.num_steps == 1:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        sent = SentBytes(self.layout)
        sent.start()
        with TokensToExperts() as tokens:
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        sent.stop()
        if self.layout.expert_parallel_size > 1:  # ZeRO has all-to-alls too
            sent.counts["data"] -= tokens.sent_bytes
        holders = find_holders(self.lightning_module, self.optimizers, self.root_device)
        ranks = {axis: dist.get_process_group_ranks(self.mesh.group(axis)) for axis in ("pp", "data", "tp")}
        self.seen = bytes_by_kind(holders), sent.counts, ranks
        return result


def fit(devices, options, kind=NanoGPT):
    ignore_warnings()
    strategy = Measured(**options)
    loader = DataLoader(Samples("tokens", 4 * BATCH), batch_size=BATCH)
    trainer_of(devices, strategy, [], max_steps=2).fit(make(kind), loader)
    return strategy.seen


def predicted(devices, options, kind=NanoGPT):
    with parameters_on_meta():
        module = make(kind)
    loader = DataLoader(Samples("tokens", 4 * BATCH), batch_size=BATCH)
    precision = "64-true" if next(module.parameters()).dtype is torch.float64 else "32-true"
    content = dry_run(
        pl, module, {"train_dataloaders": loader}, devices, options, precision, lambda layout: range(devices)
    )
    assert content["refused"] is None
    known = {PlainGPT: ["sequences are sharded"], Mixtral: ["tokens that are sent to experts"]}.get(kind, [])
    assert [note[: len(text)] for note, text in zip(content["notes"], known, strict=True)] == known
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
    check_ranks(worlds, devices, options, NanoGPT)


def check_ranks(worlds, devices, options, kind):
    ranks = predicted(devices, options, kind)
    found = worlds.run(devices, fit, devices, options, kind, timeout=240)
    for rank, (held, sent, groups) in zip(ranks, found, strict=True):
        assert {kind: rank["bytes"][kind] for kind in EXACT} == {kind: held[kind] for kind in EXACT}
        assert 0 <= held["gradients"] - rank["bytes"]["gradients"] <= FLAGS
        assert {axis: rank["groups"].get(axis, [rank["rank"]]) for axis in groups} == groups
        for axis, most in SMALL_MESSAGES.items():
            # The loss of a mixture is of 10 of 12 tokens in each of 4 samples; all count in two messages of float64.
            beyond = 2 * 8 * 8 if (kind, axis) == (Mixtral, "tensor") else 0
            assert -beyond <= sent[axis] - rank["sent_bytes"].get(axis, 0) <= most, axis


EXPERTS = [
    (2, {"expert_parallel_size": 2}),
    pytest.param(4, {"expert_parallel_size": 2, "tensor_parallel_size": 2}, marks=[pytest.mark.slow]),
    pytest.param(
        4, {"expert_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}, marks=[pytest.mark.slow]
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("devices", "options"), EXPERTS, ids=str)
def test_ranks_of_a_mixture_hold_and_send_what_was_predicted(worlds, devices, options):
    """But for tokens that are sent to experts."""
    check_ranks(worlds, devices, options, Mixtral)


SEQUENCES = [
    ("context", 2, {"context_parallel_size": 2}),
    ("tensor", 2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    ("tensor", 4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "sequence_parallel": True}),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("axis", "devices", "options"), SEQUENCES, ids=str)
def test_sharded_sequences_are_estimated(worlds, axis, devices, options):
    """Shards that one layer hands to the next are not known from one layer."""
    ranks = predicted(devices, options, PlainGPT)
    for rank, (held, sent, _) in zip(ranks, worlds.run(devices, fit, devices, options, PlainGPT), strict=True):
        assert {kind: rank["bytes"][kind] for kind in EXACT} == {kind: held[kind] for kind in EXACT}
        assert rank["sent_bytes"][axis] == pytest.approx(sent[axis], rel=0.15)


class Saving(Measured):
    """Counts the bytes of tensors that the step saves for its backward, without parameters; each storage once."""

    def training_step(self, *args, **kwargs):
        own = {parameter.untyped_storage().data_ptr() for parameter in self.lightning_module.parameters()}
        kept = {}

        def pack(tensor):
            storage = getattr(tensor, "local", tensor).untyped_storage()  # the shard of sharded logits
            kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = super().training_step(*args, **kwargs)
        self.saved = sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own)
        return output


def saved_by_step(devices, options):
    ignore_warnings()
    strategy = Saving(**options)
    loader = DataLoader(Samples("tokens", 4 * BATCH), batch_size=BATCH)
    trainer_of(devices, strategy, [], max_steps=2).fit(make(NanoGPT), loader)
    return strategy.saved


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("devices", [2, 4])
def test_activations_of_tensor_ranks(worlds, devices):
    options = {"tensor_parallel_size": devices}
    full = predicted(1, {})[0]["bytes"]["activations"]
    for rank, saved in zip(
        predicted(devices, options), worlds.run(devices, saved_by_step, devices, options), strict=True
    ):
        assert rank["bytes"]["activations"] == pytest.approx(saved, rel=0.05)
        assert saved < 0.7 * full


class Bags(pl.LightningModule):
    """Its batch is a list of samples of different lengths, which cannot be split."""

    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return torch.stack([self.head(self.body(bag).mean(0)) for bag in batch]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore")
def test_a_batch_of_samples_of_different_lengths_is_dry_run():
    loader = DataLoader([torch.ones(2 + i % 3, 4) for i in range(8)], batch_size=4, collate_fn=list)
    options = {"pipeline_parallel_size": 2}
    content = dry_run(pl, Bags(), {"train_dataloaders": loader}, 2, options, "32-true", lambda layout: range(2))
    assert content["refused"] is None and [rank["bytes"]["parameters"] for rank in content["rank"]] == [160, 36]
