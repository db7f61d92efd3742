"""Embeddings and output heads are sharded by vocabulary, and the loss equals that of the full logits."""

import dataclasses

import pytest
import torch
from lightning.pytorch import Callback
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from harness.fits import Run, check, fit, reference_of
from lightning_hybrid.logits.vocabulary import VocabularyShard
from lightning_hybrid.tensor.collectives import GroupRanks
from models.hand_written import WIDTH, Decoder, TiedInStep


class Returned(TiedInStep):
    """The step returns and stores logits, counts correct predictions, and weighs the largest."""

    def training_step(self, batch, batch_idx=0):
        logits = self(batch["input_ids"])
        self.last = logits.detach()
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)
        self.log("accuracy", (logits.argmax(-1) == batch["labels"]).double().mean())
        self.log("top", logits.topk(2).values.mean())
        return {"loss": loss + 0.01 * logits.logsumexp(-1).square().mean(), "logits": logits}


class Large(Decoder):
    """Logits are the largest tensors by far."""

    rows = 1003


def assert_vocabulary_shards(ranks):
    return {f"{fqn}.{name}" for fqn, plan in ranks[0].plans.items() for name in plan.vocabulary}


@pytest.mark.parametrize(
    ("run", "cut"),
    [
        (
            Run(Decoder, pp=2, tp=2, trainer={"gradient_clip_val": 0.05}, strategy={"verify_first_step": True}),
            {"wte.weight", "head.weight", "head.bias"},
        ),
        (Run(TiedInStep, tp=2), {"wte.weight"}),
        (Run(TiedInStep, pp=2, tp=2), {"wte.weight"}),
        pytest.param(
            Run(Decoder, tp=2, sequence=True),
            {"wte.weight", "head.weight", "head.bias"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Run("Bert", pp=2, tp=2),
            {
                "model.bert.embeddings.word_embeddings.weight",
                "model.cls.predictions.decoder.weight",
                "model.cls.predictions.bias",
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Run("T5", pp=2, tp=2),
            {f"model.{part}.weight" for part in ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: f"{value.case}-pp{value.pp}-tp{value.tp}" if isinstance(value, Run) else "",
)
def test_parity(worlds, run, cut):
    ranks, _ = check(worlds, run)
    assert assert_vocabulary_shards(ranks) == cut


def test_returned_stored_and_sorted_logits_are_full(worlds):
    ranks, expected = check(worlds, Run(Returned, tp=2, microbatches=1, callback=RecordsOutputs))
    assert assert_vocabulary_shards(ranks) == {"wte.weight"}
    for rank in ranks:
        assert rank.logged == pytest.approx(expected.logged, rel=1e-9)
        for actual, wanted in zip(rank.extra, expected.extra, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=0)


class RecordsOutputs(Callback):
    """Outputs of the step and tensors that it stored on the module."""

    def __init__(self):
        self.recorded = []

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        assert type(pl_module.last) is torch.Tensor
        self.recorded += [pl_module.last.clone(), outputs["logits"].detach().clone()]


class Sizes(Callback):
    """Shapes of the second step's results, forward and backward, on this rank."""

    def __init__(self):
        self.recorded = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1:
            self.mode = MadeShapes(self.recorded)
            self.mode.__enter__()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if hasattr(self, "mode"):
            self.mode.__exit__(None, None, None)
            del self.mode


class MadeShapes(TorchDispatchMode):
    def __init__(self, recorded):
        super().__init__()
        self.recorded = recorded

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, VocabularyShard) for kind in types):
            return NotImplemented  # operations on its shard are recorded
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else [out]
        self.recorded += [tuple(value.shape) for value in made if isinstance(value, torch.Tensor)]
        return out


def test_no_rank_makes_full_logits_or_row_gradients(worlds):
    tokens, rows = 2 * 5, Large.rows  # of a microbatch, but for the last position
    for rank in worlds.run(2, fit, Run(Large, tp=2, callback=Sizes)):
        assert any(shape == (tokens, 502) for shape in rank.extra) or any(
            shape == (tokens, 501) for shape in rank.extra
        )
        assert not [shape for shape in rank.extra if rows in shape]
    expected = reference_of(worlds, Run(Large, callback=Sizes))
    assert any(rows in shape for shape in expected.extra)


class RecordsSizes(Callback):
    """Sizes of parameters, gradients and optimizer states on this rank."""

    def __init__(self):
        self.recorded = {}

    def on_train_batch_end(self, trainer, pl_module, *_):
        with torch._C.DisableTorchFunction():
            [optimizer] = trainer.optimizers
            for name, p in pl_module.named_parameters():
                states = [v.numel() for v in optimizer.state[p].values() if v.dim()]
                self.recorded[name] = [p.numel(), p.grad.numel(), *states]


def test_all_states_are_row_shards(worlds):
    sizes_by_rank = [rank.extra for rank in worlds.run(2, fit, Run(Decoder, tp=2, callback=RecordsSizes))]
    assert [sizes["wte.weight"] for sizes in sizes_by_rank] == [[rows * WIDTH] * 4 for rows in (18, 17)]
    assert [sizes["head.bias"] for sizes in sizes_by_rank] == [[18] * 4, [17] * 4]


def count_messages(run):
    """Sums and gathers over the tensor ranks in one step."""
    counts = []

    class Counts(Callback):
        recorded = counts

        def on_train_batch_start(self, trainer, *_):
            calls.clear()

        def on_train_batch_end(self, trainer, *_):
            counts.append(list(calls))

    calls = []
    originals = {name: getattr(GroupRanks, name) for name in ("all_reduce", "all_gather")}
    for name, original in originals.items():
        setattr(
            GroupRanks, name, lambda self, t, n=name, o=original: (calls.append((n, tuple(t.shape))), o(self, t))[1]
        )
    try:
        return fit(dataclasses.replace(run, callback=Counts)).extra
    finally:
        for name, original in originals.items():
            setattr(GroupRanks, name, original)


def test_cross_entropy_sends_two_numbers_per_position(worlds):
    for counts in worlds.run(2, count_messages, Run(Decoder, tp=2, microbatches=1)):
        for calls in counts:
            of_blocks = [("all_reduce", (4, 6, WIDTH))] * 3
            of_loss = [("all_gather", (4 * 5, 1)), ("all_reduce", (4 * 5, 1))]
            lookup, into_head = ("all_reduce", (4, 6, WIDTH)), ("all_reduce", (4 * 6, WIDTH))
            assert calls[:10] == [lookup, *of_blocks, *of_loss, into_head, *of_blocks]
