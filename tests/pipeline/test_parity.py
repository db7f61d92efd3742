"""Fits under the strategy match one process: losses, every gradient, parameters after three steps."""

import dataclasses
import gc

import pytest
import torch
from lightning.pytorch import Callback

from harness.fits import Run, assert_parity, check, fit, fit_joined_batches, joined_batches, reference_of
from harness.schedules import EAGER, GPIPE, INTERLEAVED, ONE_F_ONE_B
from lightning_hybrid.step.standins.tensors import is_absent
from models.cases import sample
from models.hand_written import mlp


def name_of(run):
    schedule = run.strategy.get("schedule", "1f1b")
    return f"{run.case}-pp{run.pp}-dp{run.dp}-m{run.microbatches}-{schedule}-{str(run.dtype)[6:]}"


def covered(run):
    """Other runs cover it: the module with replicas, and the layout with another module."""
    return pytest.param(run, marks=pytest.mark.slow)


GRID = [
    covered(Run("GPT2", pp=2, dp=2, strategy=ONE_F_ONE_B)),
    Run("GPT2", pp=4, strategy=GPIPE, microbatches=4),
    covered(Run("GPT2", pp=2, strategy=INTERLEAVED)),
    covered(Run("GPT2", pp=2, dtype=torch.float32)),
    covered(Run("Llama", pp=4, microbatches=4)),
    covered(Run("Llama", pp=2, dp=2, strategy=INTERLEAVED)),
    Run("Llama", pp=2, strategy=INTERLEAVED),
    covered(Run("T5", pp=2, dp=2, strategy=GPIPE)),
    Run("T5", pp=2, strategy=GPIPE),
    covered(Run("T5", pp=4, strategy=ONE_F_ONE_B)),
    covered(Run("Bert", pp=2, strategy=INTERLEAVED)),
    covered(Run("Bert", pp=2, dp=2)),
    covered(Run("ViT", pp=4, strategy=GPIPE)),
    covered(Run("ViT", pp=2, dp=2)),
    Run("ViT", pp=2),
    covered(Run("UNet", pp=4, microbatches=4)),
    Run("UNet", pp=2, dp=2, strategy=INTERLEAVED),
    Run("InPlace", pp=2, dp=2, strategy=INTERLEAVED),
    Run("AuxiliaryLosses", pp=4),
    Run("AuxiliaryLosses", pp=2, dp=2, microbatches=4, strategy=EAGER),
    covered(Run("GlueParameters", pp=2, dp=2)),
    Run("GlueParameters", pp=2),
    covered(Run("Containers", pp=2, dp=2, strategy=GPIPE)),
    Run("Containers", pp=2, strategy=GPIPE),
    Run("SeveralForwards", pp=2),
    Run("Recurrent", pp=2),
    Run("Tied", dp=2, microbatches=1),
    Run("Tied", dp=2, microbatches=2),
    Run("Tied", pp=1, strategy={"stages_per_rank": 2}),
]


@pytest.mark.parametrize("run", GRID, ids=name_of)
def test_parity(worlds, run):
    check(worlds, run, tolerance=1e-10 if run.dtype == torch.float64 else 2e-3)


# --- randomness, accumulation, reduction -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "case"),
    [
        (ONE_F_ONE_B, "Dropouts"),
        pytest.param(ONE_F_ONE_B, "GPT2Dropout", marks=pytest.mark.slow),
        (INTERLEAVED, "Dropouts"),
        pytest.param(INTERLEAVED, "GPT2Dropout", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else value["schedule"],
)
def test_dropout_matches_one_process(worlds, case, strategy):
    run = Run(case, pp=2, dp=2, strategy=strategy)
    _, expected = check(worlds, run, fit_joined_batches)
    other = reference_of(worlds, dataclasses.replace(run, change=without_dropout), fit_joined_batches)
    assert not torch.equal(other.losses[0], expected.losses[0]), "dropout must be on"


def without_dropout(module):
    for part in module.modules():
        part.train = lambda mode=True, part=part: part
        part.training = False


@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_divided_by_microbatches_once(worlds, microbatches):
    check(worlds, Run("Layers", pp=2, microbatches=microbatches))


def test_reduction_not_skipped_when_stages_and_replicas_combine(worlds):
    run = Run("Layers", pp=2, dp=2)
    ranks, expected = check(worlds, run)
    alone, _ = check(worlds, Run("Layers", pp=2))
    name = "layers.0.0.weight"
    holders = [rank for rank in ranks if name in rank.grads[0]]
    assert len(holders) == 2 and torch.equal(holders[0].grads[0][name], holders[1].grads[0][name])
    assert not torch.equal(ranks[0].losses[0], ranks[1].losses[0]), "the replicas must see different batches"
    assert not torch.allclose(alone[0].grads[0][name], expected.grads[0][name])


# --- clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["Tied", pytest.param("GPT2", marks=pytest.mark.slow)])
def test_norm_clipping_counts_shared_parameters_once(worlds, case):
    run = Run(case, pp=2, dp=2, trainer={"gradient_clip_val": 0.05})
    ranks, expected = check(worlds, run)
    norm = torch.stack([grad.norm() for grad in expected.grads[0].values()]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.05, dtype=norm.dtype), rtol=1e-4, atol=0)  # it did clip
    assert any(len(stages) > 1 for stages in ranks[0].stages.values()), "the embedding must be tied over stages"


def test_clipping_by_value(worlds):
    trainer = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    _, expected = check(worlds, Run("Tied", pp=2, trainer=trainer))
    assert max(float(grad.abs().max()) for grad in expected.grads[0].values()) == 1e-3


# --- batches ---------------------------------------------------------------------------------------------------------


def of_different_lengths(samples):
    """Batches whose length is a function of their first sample."""
    batch = torch.utils.data.default_collate(samples)
    length = 3 + int(batch["input_ids"][0, 0]) % 4
    return {name: tensor[:, :length] for name, tensor in batch.items()}


def test_batch_shape_changes_between_steps(worlds):
    run = Run("GPT2", pp=2, num_batches=5, collate=of_different_lengths)
    check(worlds, run)
    lengths = {3 + int(sample("tokens", batch[0])["input_ids"][0]) % 4 for batch in joined_batches(run)}
    assert len(lengths) > 1, "the lengths must differ"


@pytest.mark.parametrize(("last", "microbatches"), [(5, 3), (1, 1)])
def test_last_batch_divides_unevenly(worlds, last, microbatches):
    """Five samples in microbatches of two, which weigh 2/5, 2/5 and 1/5."""
    run = Run("Layers", pp=2, batch_size=6, microbatches=3, last=last)
    expected = reference_of(worlds, run)
    ranks = worlds.run(2, fit, run)
    assert [rank.num_microbatches for rank in ranks] == [microbatches] * 2
    assert_parity(ranks, expected, dataclasses.replace(run, microbatches=microbatches))


def test_labels_of_the_right_microbatch(worlds):
    """One sample per microbatch, and labels that differ between any two of them."""
    run = Run("Layers", pp=4, batch_size=8, microbatches=8, num_batches=2)
    _, expected = check(worlds, run)
    wrong = reference_of(worlds, dataclasses.replace(run, collate=labels_rolled))
    assert not torch.allclose(wrong.losses[0], expected.losses[0])


def labels_rolled(samples):
    batch = torch.utils.data.default_collate(samples)
    return {**batch, "label": batch["label"].roll(1)}


def masked_unevenly(samples):
    """Labels that are ignored, more of them in some samples than in others."""
    batch = torch.utils.data.default_collate(samples)
    place = torch.arange(batch["labels"].shape[1])
    return {**batch, "labels": batch["labels"].masked_fill(place >= 2 + batch["input_ids"][:, :1] % 4, -100)}


def test_loss_masked_unevenly(worlds):
    """The loss is the mean over the unmasked labels of the full batch, not of the microbatches' means."""
    run = Run("GPT2", pp=2, microbatches=2, collate=masked_unevenly)
    ranks = worlds.run(2, fit, run)
    expected = reference_of(worlds, run)
    assert_parity(ranks, expected, run)
    small = dataclasses.replace(
        run, batch_size=2, num_batches=4, trainer={"accumulate_grad_batches": 2}, microbatches=1
    )
    accumulated = reference_of(worlds, small)
    first = accumulated.losses[0] + accumulated.losses[1]
    assert not torch.allclose(first, expected.losses[0]), "the masks must differ between microbatches"


def test_mask_selects_different_number_of_rows(worlds):
    run = Run("Masks", pp=2, dp=2, strategy={"pipeline_cuts": ["layers.2"]}, num_batches=4)
    ranks, _ = check(worlds, run)
    assert ranks[0].units == [["layers.0", "layers.1"], ["layers.2", "layers.3"]]


# --- the module ------------------------------------------------------------------------------------------------------


class Unfreeze(Callback):
    """The last layers train from the start, the first from the second step on."""

    recorded = None

    def on_fit_start(self, trainer, pl_module):
        pl_module.layers[0].requires_grad_(False)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.layers[0].requires_grad_(batch_idx >= 1)


def freeze_first(module):
    module.layers[0].requires_grad_(False)
    module.optimizer = "sgd"


def test_unfrozen_mid_run(worlds):
    _, expected = check(worlds, Run("Layers", pp=2, callback=Unfreeze, change=freeze_first))
    assert "layers.0.0.weight" not in expected.grads[0] and "layers.0.0.weight" in expected.grads[1]


def store_outputs(module):
    """The documented idiom: append in validation_step, stack at the end of the epoch."""
    module.outputs = []

    def validation_step(batch, batch_idx):
        module.outputs.append(module(batch["x"]))

    def on_validation_epoch_end():
        module.stacked = torch.cat(module.outputs).detach()
        module.outputs.clear()

    module.validation_step = validation_step
    module.on_validation_epoch_end = on_validation_epoch_end


class StoresOutputs(Callback):
    def on_validation_end(self, trainer, pl_module):
        self.recorded = pl_module.stacked.clone()


def test_values_stored_on_self(worlds):
    run = Run("Layers", pp=2, validate=True, change=store_outputs, callback=StoresOutputs)
    ranks, expected = check(worlds, run)
    assert expected.extra.shape == (8, 4)
    for rank in ranks:
        torch.testing.assert_close(rank.extra, expected.extra, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strategy", [GPIPE, INTERLEAVED], ids=lambda s: s["schedule"])
def test_buffers_after_run(worlds, strategy):
    """Statistics are those of gradient accumulation: every microbatch is a batch to BatchNorm."""
    run = Run("BatchNorms", pp=2, microbatches=2, strategy=strategy)
    small = Run("BatchNorms", batch_size=2, num_batches=4, microbatches=1, trainer={"accumulate_grad_batches": 2})
    expected = reference_of(worlds, small)
    expected.losses = [a + b for a, b in zip(expected.losses[::2], expected.losses[1::2], strict=True)]
    ranks = worlds.run(2, fit, run)
    assert_parity(ranks, expected, run)
    assert all(int(rank.state["norm.num_batches_tracked"]) == 4 for rank in ranks)


# --- number formats --------------------------------------------------------------------------------------------------


def tiny_loss(module):
    """A loss whose gradients are zero in float16 unless they are scaled, also when sent between stages."""
    original = module.loss
    module.loss = lambda batch: original(batch) * 1e-7
    module.optimizer = "sgd"


def tiny_loss_and_frozen_stage(module):
    tiny_loss(module)
    module.layers[:2].requires_grad_(False)


@pytest.mark.parametrize("change", [tiny_loss, tiny_loss_and_frozen_stage], ids=lambda change: change.__name__)
def test_fp16_loss_gradient_that_is_zero_unscaled(worlds, change):
    run = Run("Layers", pp=2, dtype=torch.float32, precision="16-mixed", change=change)
    ranks, expected = check(worlds, run, tolerance=0.05)
    assert all(rank.scale == expected.scale for rank in ranks) and expected.scale > 1
    assert all(grad.any() for grad in expected.grads[0].values())


def huge_loss(module):
    original = module.loss
    module.loss = lambda batch: original(batch) * 1e3
    module.optimizer = "sgd"


def test_fp16_overflow_is_seen_by_all_ranks(worlds):
    run = Run("Layers", pp=2, dtype=torch.float32, precision="16-mixed", change=huge_loss)
    expected = reference_of(worlds, run)
    ranks = worlds.run(2, fit, run)
    assert expected.scale < 65536.0 and [rank.scale for rank in ranks] == [expected.scale] * 2
    assert [len(rank.grads) for rank in ranks] == [len(expected.grads)] * 2


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("bf16-mixed", 0.1), ("64-true", 1e-10), ("bf16-true", 0.2)], ids=lambda v: str(v)
)
def test_precisions(worlds, precision, tolerance):
    run = Run("Layers", pp=2, dtype=torch.float32, trainer={"precision": precision}, change=use_sgd)
    ranks, _ = check(worlds, run, tolerance=tolerance)
    meant = {"bf16-mixed": torch.float32, "64-true": torch.float64, "bf16-true": torch.bfloat16}[precision]
    assert {value.dtype for rank in ranks for value in rank.state.values()} == {meant}


def use_sgd(module):
    module.optimizer = "sgd"


# --- memory ----------------------------------------------------------------------------------------------------------


class CountsBytes(Callback):
    """Bytes of all storages that came to life since it was made, after set-up and after the second step."""

    def __init__(self):
        gc.collect()
        self.earlier = live_tensors()  # kept alive, so that no address is used again

    def count(self):
        gc.collect()
        with torch._C.DisableTorchFunction():  # of this rank alone
            return self._bytes()

    def _bytes(self):
        known = {tensor.untyped_storage().data_ptr() for tensor in self.earlier}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in live_tensors()}
        return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in known)

    def on_train_start(self, trainer, pl_module):
        self.after_setup = self.count()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            own = [p for p in pl_module.parameters() if not is_absent(p)]
            absent = [p for p in pl_module.parameters() if is_absent(p)]
            with torch._C.DisableTorchFunction():  # hooks see the gradients of all ranks; this is about local ones
                assert all(p.grad is None for p in absent)
            assert not any(p in trainer.optimizers[0].state for p in absent)
            self.recorded = {
                "after_setup": self.after_setup,
                "live": self.count(),
                "own": sum(p.nbytes for p in own),
                "all": sum(p.nbytes for p in own) + sum(p.numel() * p.element_size() for p in absent),
            }


def live_tensors():
    return [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and not is_absent(t)]


def many_layers(module):
    module.layers.extend(mlp(16).double() for _ in range(28))


def test_parameters_of_other_stages_are_absent(worlds):
    run = Run("Layers", pp=4, change=many_layers, callback=CountsBytes)
    ranks = worlds.run(4, fit, run)
    notes = [rank.extra for rank in ranks]
    assert sum(note["own"] for note in notes) == notes[0]["all"]
    for note in notes:
        assert note["own"] < 0.4 * note["all"]
        # Parameters, gradients and two moments of Adam, and two copies of the gradients in the harness's records;
        # the rest is the batches and values of one step.
        rest = 0.05 * note["all"]
        assert note["own"] <= note["after_setup"] < note["own"] + rest, note
        assert 6 * note["own"] <= note["live"] < 6 * note["own"] + rest, note


def num_unmasked(microbatch):
    """Labels that count in GPT-2's shifted cross entropy."""
    return (microbatch["labels"][:, 1:] != -100).sum()


@pytest.mark.parametrize("dp", [1, 2])
def test_loss_masked_unevenly_and_weighted_by_count(worlds, dp):
    """With ``microbatch_weight`` the loss is the full batch's mean over unmasked labels, replicas included."""
    run = Run("GPT2", pp=2, dp=dp, microbatches=2, collate=masked_unevenly)
    weighted = dataclasses.replace(run, strategy={"microbatch_weight": num_unmasked})
    ranks = worlds.run(2 * dp, fit, weighted)
    expected = reference_of(worlds, run)
    # Each replica returns its share of the loss, so that the mean over replicas is the full batch's.
    means = [torch.stack(losses).mean(0) for losses in zip(*(rank.losses for rank in ranks), strict=True)]
    torch.testing.assert_close(means, expected.losses, rtol=1e-10, atol=0)
    for rank in ranks:
        rank.losses = means
    assert_parity(ranks, expected, run)
