"""Losses that are means over tokens, weights or rows: over microbatches they equal those of the full batch."""

import warnings
from typing import ClassVar

import lightning.pytorch as L
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from harness.logged_steps import SAMPLES, Classifier, assert_steps_agree
from harness.trainer_runs import ignore_warnings, lines_of_lightning, trainer_of, weights_of
from harness.verification import COMBINED, TENSOR, check
from lightning_hybrid.errors import FirstStepError
from lightning_hybrid.pipeline.means import LossMeanWeights
from lightning_hybrid.verify import Layout

VOCABULARY, LENGTH, CLASSES, FEATURES = 24, 7, 4, 6


def tokens():
    """Labels of which each sample has another number, some none at all; masks, weights and rows."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for index in range(SAMPLES):
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        count = 0 if index in (2, 3) else 1 + index * 5 % LENGTH
        labels = torch.where(torch.arange(LENGTH) < LENGTH - count, -100, ids)
        x = torch.randn(LENGTH, FEATURES, generator=generator, dtype=torch.float64)
        samples.append({"input_ids": ids, "labels": labels, "x": x, "mask": labels != -100, "y": labels % CLASSES})
    return samples


class Tokens(Classifier):
    """A prediction per position of a sequence."""

    def training_step(self, batch, batch_idx):
        return self.loss(self.head(self.body(batch["x"])), batch)

    def validation_step(self, batch, batch_idx):
        loss = self.training_step(batch, batch_idx)
        self.log("val_loss", loss["loss"] if isinstance(loss, dict) else loss)

    def labels(self, batch):
        return torch.where(batch["mask"], batch["y"], -100)


class Ignoring(Tokens):
    def loss(self, logits, batch):
        loss = F.cross_entropy(logits.flatten(0, 1), self.labels(batch).flatten())
        self.log("loss", loss)
        self.log("perplexity", loss.exp())
        return loss


class ByClass(Tokens):
    """Class weights, another label that is ignored, smoothed labels; a module of torch, in two dimensions."""

    def __init__(self):
        super().__init__()
        weight = torch.tensor([0.1, 1.0, 2.0, 3.0], dtype=torch.float64)
        self.criterion = nn.CrossEntropyLoss(weight, ignore_index=3, label_smoothing=0.1)

    def loss(self, logits, batch):
        loss = self.criterion(logits.transpose(1, 2), batch["y"])
        self.log("loss", loss)
        return loss


class NegativeLogLikelihood(Tokens):
    def loss(self, logits, batch):
        return 0.5 * F.nll_loss(logits.log_softmax(-1).permute(0, 2, 1), self.labels(batch)) / 3


class MaskedSum(Tokens):
    """Divided by the number of tokens, which may be zero."""

    def loss(self, logits, batch):
        each = F.cross_entropy(logits.transpose(1, 2), batch["y"] % CLASSES, reduction="none")
        mask = batch["mask"].double()
        loss = (each * mask).sum() / mask.sum().clamp(min=1)
        self.log("loss", loss)
        correct = ((logits.argmax(-1) == batch["y"]) * mask).sum()
        self.log("accuracy", correct / mask.sum())
        return loss


class SumByCount(Tokens):
    """A loss that sums, divided by a number read from the batch."""

    def loss(self, logits, batch):
        summed = F.cross_entropy(logits.flatten(0, 1), self.labels(batch).flatten(), reduction="sum")
        return -(-summed / max(1, int(batch["mask"].sum())))


class Picked(Tokens):
    """The rows that a mask picks."""

    def loss(self, logits, batch):
        mask = batch["mask"]
        self.log("size", logits[mask].square().mean())
        return F.mse_loss(logits[mask].sum(-1), batch["x"][mask].sum(-1))


class SeveralTerms(Tokens):
    """Means over tokens, over weights, over samples and a penalty; one has a weight that is learnt."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def loss(self, logits, batch):
        token = F.cross_entropy(logits.flatten(0, 1), self.labels(batch).flatten())
        weights = batch["x"][..., 0].exp()
        weighted = (logits.square().mean(-1) * weights).sum() / weights.sum()
        plain = logits.square().mean()
        penalty = sum(p.square().sum() for p in self.head.parameters())
        losses = {"token": token, "weighted": weighted, "plain": plain, "penalty": penalty}
        self.log_dict(losses)
        total = (
            token * torch.exp(-self.log_scale) / (1 + self.log_scale.square())
            + self.log_scale
            + 0.1 * weighted
            + 0.2 * plain
            + 0.01 * penalty
        )
        self.log("total", total)
        return {"loss": total, **{name: value.detach() for name, value in losses.items()}}


class TimesItsCount(Tokens):
    """Scaled back to a sum, per sample: no weights are needed."""

    def loss(self, logits, batch):
        token = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten() % 5 - 1, ignore_index=-1)
        return token * (batch["labels"] % 5 != 0).sum() / len(logits)


class ClassWeights(Tokens):
    def loss(self, logits, batch):
        weight = torch.arange(1, logits.shape[-1] + 1, dtype=logits.dtype)
        return F.cross_entropy(logits.flatten(0, 1), self.labels(batch).flatten(), weight=weight)


class Finetuned(Classifier):
    """A model of transformers that returns its loss."""

    model_class: ClassVar = None
    options: ClassVar = {}

    def __init__(self):
        super().__init__()
        del self.body, self.head
        torch.manual_seed(0)
        self.model = self.model_class(self.model_class.config_class(**self.options)).double()

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))


SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Causal(Finetuned):
    """Computes its loss in float32."""

    model_class = transformers.GPT2LMHeadModel
    options: ClassVar = {
        "vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip


class ManualCausal(Causal):
    def training_step(self, batch, batch_idx):
        logits = self.model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss


class Masked(Finetuned):
    model_class = transformers.BertForMaskedLM
    options: ClassVar = {**SIZES, **NO_DROPOUT, "vocab_size": VOCABULARY, "max_position_embeddings": 16}


class SequenceToSequence(Finetuned):
    model_class = transformers.T5ForConditionalGeneration
    options: ClassVar = {
        "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
        "decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "dropout_rate": 0.0,
    }  # fmt: skip


def fit(module_class, pp, count, validates=False):
    ignore_warnings()
    options: ClassVar = {"num_microbatches": count} if count > 1 else {}
    trainer = trainer_of(pp, pp, strategy_options=options)
    module = module_class()
    loader = DataLoader(tokens(), 8)
    if validates:
        trainer.validate(module, loader, verbose=False)
        return {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.fit(module, loader)
    return module.seen


class BatchLabels(Tokens):
    """Labels of the batch itself, of which none is ignored but in the last batch."""

    seen: ClassVar = []  # a growing attribute of the module may control the step

    def __init__(self):
        super().__init__()
        del self.seen

    def loss(self, logits, batch):
        return F.cross_entropy(logits.flatten(0, 1), batch["own"].view(-1))


class ShiftedLabels(BatchLabels):
    """Each position predicts the next one; the labels are copies, and the last ones are ignored."""

    def loss(self, logits, batch):
        labels = F.pad(batch["own"].clone(), (0, 1), value=-100)[:, 1:].contiguous()
        return F.cross_entropy(logits.flatten(0, 1), labels.view(-1))


def batch_label_tokens():
    samples = tokens()
    for index, sample in enumerate(samples):
        sample["own"] = sample.pop("y").clone()
        if index >= 2 * SAMPLES // 3:
            sample["own"][: index % 5] = -100
        del sample["labels"]
    return samples


def fit_counting(pp, module_class):
    """The steps, and the batches before which the step was re-run to count."""
    ignore_warnings()
    counted, count = [], LossMeanWeights._counted
    module_class.seen = []
    module = module_class()

    def recorded(shares, call, parts, **options):
        counted.append(call.number)
        return count(shares, call, parts, **options)

    trainer = trainer_of(pp, pp, strategy_options={"num_microbatches": 3} if pp > 1 else {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossMeanWeights, "_counted", recorded)
        trainer.fit(module, DataLoader(batch_label_tokens(), 8))
    return module.seen, counted


@pytest.mark.parametrize("module_class", [BatchLabels, ShiftedLabels])
def test_no_weights_without_ignored_labels(worlds, module_class):
    [(expected, _)] = worlds.run(1, fit_counting, 1, module_class)
    ranks = worlds.run(2, fit_counting, 2, module_class)
    # At set-up, for its two comparisons with the full batch, and in the last batch.
    assert [counted for _, counted in ranks] == [[0, 0, 0, 2]] * 2
    assert_steps_agree(expected, [seen for seen, _ in ranks])


class WrittenLabels(BatchLabels):
    """Writes the ignored label into its batch."""

    def loss(self, logits, batch):
        labels = self.labels(batch)
        labels[labels == -7] = -100
        return F.cross_entropy(logits.flatten(0, 1), labels.view(-1))

    def labels(self, batch):
        return batch["own"]


class WrittenCopies(WrittenLabels):
    """Writes the ignored label into a copy of labels of its batch."""

    def labels(self, batch):
        return batch["own"].flatten().contiguous()


class WrittenClones(WrittenLabels):
    def labels(self, batch):
        return batch["own"].clone()


def padded_tokens():
    samples = batch_label_tokens()
    for sample in samples:
        sample["own"] = torch.where(sample["own"] == -100, -7, sample["own"])
    return samples


def fit_padded(pp, module_class):
    ignore_warnings()
    trainer = trainer_of(pp, pp, strategy_options={"num_microbatches": 3} if pp > 1 else {})
    module_class.seen = []
    module = module_class()
    trainer.fit(module, DataLoader(padded_tokens(), 8))
    return module.seen


@pytest.mark.parametrize("module_class", [WrittenLabels, WrittenCopies, WrittenClones])
def test_labels_that_the_step_writes_are_counted(worlds, module_class):
    [expected] = worlds.run(1, fit_padded, 1, module_class)
    assert_steps_agree(expected, worlds.run(2, fit_padded, 2, module_class))


def tolerance_of(module_class):
    return 1e-6 if module_class is Causal else 1e-10


FORMS = [Ignoring, ByClass, NegativeLogLikelihood, MaskedSum, SumByCount, Picked, SeveralTerms, TimesItsCount]
MODELS = [Causal, ManualCausal, Masked, SequenceToSequence]


@pytest.mark.parametrize("count", [4, 3])
@pytest.mark.parametrize("module_class", FORMS + MODELS)
def test_weighted_means_match_the_full_batch(worlds, module_class, count):
    [expected] = worlds.run_once(1, fit, module_class, 1, 1)
    assert_steps_agree(expected, worlds.run(2, fit, module_class, 2, count), tolerance_of(module_class))


@pytest.mark.parametrize("module_class", [Ignoring, MaskedSum, SeveralTerms, *MODELS])
def test_validation_means_match_the_full_batch(worlds, module_class):
    [expected] = worlds.run(1, fit, module_class, 1, 1, True)
    for logged in worlds.run(2, fit, module_class, 2, 4, True):
        assert logged == pytest.approx(expected, rel=tolerance_of(module_class))


def lines_at_start(module_class, options):
    ignore_warnings()
    trainer = trainer_of(2, 2, strategy_options={"num_microbatches": 4, **options}, limit_train_batches=1)
    with lines_of_lightning() as lines:
        trainer.fit(module_class(), DataLoader(tokens(), 8))
    [table] = [line for line in lines if line.startswith("hybrid3d")] or [""]
    return [line for line in table.splitlines() if line.startswith("each microbatch is weighted")]


def by_sample(microbatch):
    return len(microbatch["mask"])


def test_start_table_names_the_means(worlds):
    [of_labels, of_masks], _ = worlds.run(2, lines_at_start, SeveralTerms, {})
    weighted = "each microbatch is weighted by its"
    assert of_labels.startswith(f"{weighted} number of labels that are not ignored: cross_entropy (test_means.py:")
    assert of_masks.startswith(f"{weighted} sum of a mask or of weights: div (test_means.py:")
    assert worlds.run(2, lines_at_start, TimesItsCount, {"microbatch_weight": by_sample}) == [[], []]
    [of_weights], _ = worlds.run(2, lines_at_start, ClassWeights, {})
    assert of_weights.startswith(f"{weighted} sum of the class weights of its labels: cross_entropy (test_means.py:")


def fit_verified(module_class):
    """The message of the check of the first step, if it fails."""
    ignore_warnings()
    options = {"num_microbatches": 4, "verify_first_step": True}
    trainer = trainer_of(2, 2, strategy_options=options, limit_train_batches=1)
    try:
        trainer.fit(module_class(), DataLoader(tokens(), 8))
    except FirstStepError as error:
        return str(error)


@pytest.mark.parametrize("module_class", [Ignoring, SequenceToSequence])
def test_first_step_check_uses_the_batch_mean(worlds, module_class):
    assert worlds.run(2, fit_verified, module_class) == [None, None]


def loaders():
    return {"train_dataloaders": DataLoader(tokens(), 8), "val_dataloaders": DataLoader(tokens(), 8)}


PP2 = Layout("pp2 x 4 microbatches", 2, {"pipeline_parallel_size": 2, "num_microbatches": 4})
VERIFIED = [
    (Ignoring, PP2), (SeveralTerms, PP2), (Ignoring, COMBINED), (SequenceToSequence, COMBINED), (MaskedSum, COMBINED),
    (Ignoring, TENSOR), (Masked, TENSOR),
]  # fmt: skip


@pytest.mark.parametrize(("module_class", "layout"), VERIFIED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_verify_uses_the_batch_mean(worlds, module_class, layout):
    """Over replicas it is the mean of the replicas' means, as under DDP."""
    report = check(worlds, module_class, layout, make_data=loaders, steps=3)
    assert report.outcome == "same", str(report)


class Rounded(Classifier):
    """Logs a mean of 16 bits."""

    def training_step(self, batch, batch_idx):
        loss = self.body(batch["x"]).square().mean()
        self.log("loss_of_rows", loss)
        return loss


def warnings_of_rounded_means(pp):
    ignore_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = Rounded().float()
        options = {"num_microbatches": 4}
        trainer = trainer_of(2, pp, max_steps=2, precision="bf16-mixed", strategy_options=options)
        rows = [{"x": torch.randn(FEATURES, generator=torch.Generator().manual_seed(i))} for i in range(16)]
        trainer.fit(module, DataLoader(rows, batch_size=8))
    return [str(each.message) for each in caught if "parts" in str(each.message)]


@pytest.mark.parametrize("pp", [2, 1])
def test_a_mean_of_16_bits_is_one_but_for_its_rounding(worlds, pp):
    assert worlds.run(2, warnings_of_rounded_means, pp) == [[], []]


class Untrained(L.LightningModule):
    """A language model that knows nothing yet: the losses of all parts of a batch are nearly equal."""

    def __init__(self, seed):
        super().__init__()
        self.seed, self.seen = seed, []
        torch.manual_seed(seed)
        self.table, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        nn.init.normal_(self.head.weight, std=0.003)
        nn.init.zeros_(self.head.bias)

    def training_step(self, batch, batch_idx):
        logits = self.head(self.table(batch["input_ids"]))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(1, VOCABULARY, (64, 12), generator=generator)
        for row, length in zip(ids, torch.randint(6, 13, (64,), generator=generator).tolist(), strict=True):
            row[length:] = 0
        labels = ids.masked_fill((ids == 0) | (torch.arange(12) < 3), -100)  # neither padding nor a prompt
        return DataLoader([{"input_ids": i, "labels": j} for i, j in zip(ids, labels, strict=True)], batch_size=16)


def logs_of_untrained(seed, options):
    ignore_warnings()
    module = Untrained(seed)
    trainer_of(1, 1, max_steps=4, strategy_options=options).fit(module)
    return module.seen, weights_of(module)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [2, 4])
def test_losses_of_parts_that_are_nearly_equal_are_means_over_labels(worlds, seed, count):
    [(expected, weights)] = worlds.run(1, logs_of_untrained, seed, {})
    [(logged, found)] = worlds.run(1, logs_of_untrained, seed, {"num_microbatches": count})
    assert logged == pytest.approx(expected, rel=2e-6)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6)
