"""``chunked_loss`` in fits: the numbers of one process without it, under each layout, and no full logits."""

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.fits import Run, check, fit
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.techniques.logits import ChunkedLosses
from models.hand_written import LENGTH, VOCABULARY, WIDTH, Decoder, Lit, mlp
from models.wide import BertWide, GPT2Wide, LlamaWide, NanoGPTWide

CHUNKED = {"chunked_loss": 3}


class Heads(Callback):
    """Records which heads had losses in chunks, and what read their logits in full."""

    def __init__(self):
        self.recorded = {}

    def on_train_batch_end(self, trainer, *_):
        run = getattr(trainer.strategy, "run", None)
        losses = None if run is None else getattr(run.technique(ChunkedLosses), "losses", None)
        for fqn, head in (losses.heads if losses is not None else {}).items():
            self.recorded[fqn] = head.chunks_of, sorted(head.reads)


class TransposedTied(NanoGPTWide):
    """Labels by position, and logits with the vocabulary in dim 1."""

    def loss(self, batch):
        return F.cross_entropy(self(batch["input_ids"]).transpose(1, 2), batch["labels"], label_smoothing=0.1)


class Accuracy(NanoGPTWide):
    """Reads logits for a metric that is logged."""

    def loss(self, batch):
        logits, labels = self(batch["input_ids"]), batch["labels"]
        self.log("accuracy", (logits.argmax(-1) == labels).double().mean())
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class TopAccuracy(NanoGPTWide):
    """Reads full logits for a metric, and returns them."""

    def training_step(self, batch, batch_idx=0):
        logits, labels = self(batch["input_ids"]), batch["labels"]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.log("top", (logits.detach().topk(3, -1).indices == labels.unsqueeze(-1)).any(-1).double().mean())
        return {"loss": loss, "logits": logits.detach()}


class TokenLosses(NanoGPTWide):
    """A mean over the tokens that a mask selects, of losses without a reduction."""

    def loss(self, batch):
        logits, labels = self(batch["input_ids"]), batch["labels"]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * (labels.flatten() % 3 + 1)).mean()


def name_of(run):
    sizes = "".join(f"-{name}{getattr(run, name)}" for name in ("pp", "dp", "tp", "cp") if getattr(run, name) > 1)
    options = "".join(f"-{name}={value}" for name, value in run.strategy.items() if name != "chunked_loss")
    flags = "-sequence" * run.sequence + "-validate" * run.validate
    return f"{run.case.__name__}{sizes}-m{run.microbatches}{options}{flags}"


ONE = {"microbatches": 1, "strategy": CHUNKED, "callback": Heads}
TWO = {"microbatches": 2, "strategy": CHUNKED, "callback": Heads}


def zero(stage, **options):
    return {**TWO, "dp": 2, "strategy": {**CHUNKED, "zero_stage": stage, **options}}


slow = pytest.mark.slow
RUNS = [
    Run(NanoGPTWide, **ONE),
    Run(BertWide, **ONE),
    Run(TransposedTied, **TWO),
    Run(TokenLosses, **TWO),
    Run(GPT2Wide, dp=2, **ONE),
    Run(LlamaWide, **zero(3, reshard_after_forward=True)),
    Run(LlamaWide, pp=2, **TWO),
    Run(NanoGPTWide, pp=2, **TWO, trainer={"gradient_clip_val": 0.05}),
    Run(LlamaWide, cp=2, **ONE),
    *(
        pytest.param(run, marks=slow)
        for run in [
            Run(LlamaWide, dp=2, **TWO, trainer={"accumulate_grad_batches": 2}),
            Run(BertWide, **zero(3, reshard_after_forward=True)),
            Run(TokenLosses, **zero(3, reshard_after_forward=True)),
            Run(NanoGPTWide, **zero(3, reshard_after_forward=True)),
            Run(LlamaWide, **zero(3, reshard_after_forward=False)),
            Run(LlamaWide, **zero(2)),
            Run(LlamaWide, pp=2, **zero(3, reshard_after_forward=True)),
            Run(TransposedTied, pp=2, **TWO),
            Run(LlamaWide, **ONE, validate=True),
            Run(LlamaWide, pp=2, **TWO, validate=True),
            Run(LlamaWide, pp=2, **{**TWO, "strategy": {**CHUNKED, "verify_first_step": True}}),
            Run(LlamaWide, **{**ONE, "strategy": {**CHUNKED, "compile": {"backend": "eager"}}}),
            Run(LlamaWide, dp=2, **{**TWO, "strategy": {**CHUNKED, "compile": {"backend": "eager"}, "zero_stage": 3}}),
            Run(TokenLosses, pp=2, **TWO),
            Run(LlamaWide, pp=2, **{**TWO, "strategy": {**CHUNKED, "schedule": "gpipe"}}),
            Run(LlamaWide, pp=2, **{**TWO, "strategy": {**CHUNKED, "schedule": "zero_bubble"}}),
            Run(LlamaWide, **{**TWO, "strategy": {**CHUNKED, "recompute": "full"}}),
            Run(LlamaWide, **{**ONE, "strategy": {**CHUNKED, "recompute": "full"}}),
            Run(LlamaWide, pp=2, **{**TWO, "strategy": {**CHUNKED, "recompute": "full"}}),
            Run(BertWide, **{**ONE, "strategy": {**CHUNKED, "recompute": "full"}}),
        ]
    ),
]


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_parity(worlds, run):
    ranks, _ = check(worlds, run, timeout=600)
    found = {fqn: seen for rank in ranks for fqn, seen in rank.extra.items()}
    assert len(found) == 1, found
    [(chunks, reads)] = found.values()
    assert chunks is not None and chunks[1] == 3 and not reads


@pytest.mark.parametrize("run", [Run(Accuracy, **TWO), Run(Accuracy, pp=2, **TWO)], ids=name_of)
def test_accuracy_is_computed_in_chunks(worlds, run):
    ranks, expected = check(worlds, run, timeout=600)
    for rank in ranks:
        assert rank.logged["accuracy"] == pytest.approx(expected.logged["accuracy"], abs=1e-12)
    [(_, reads)] = ranks[-1].extra.values()
    assert not reads


@pytest.mark.parametrize(
    "run", [Run(TopAccuracy, **ONE), Run(TopAccuracy, **TWO), Run(TopAccuracy, pp=2, **TWO)], ids=name_of
)
def test_metrics_of_full_logits(worlds, run):
    ranks, expected = check(worlds, run, timeout=600)
    for rank in ranks:
        assert rank.logged["top"] == pytest.approx(expected.logged["top"], abs=1e-12)
    [(chunks, reads)] = ranks[-1].extra.values()
    assert chunks is not None and "topk" in reads


def of_tensor_ranks(*runs):
    return [pytest.param(run, marks=() if index < 3 else slow, id=name_of(run)) for index, run in enumerate(runs)]


@pytest.mark.parametrize(
    "run",
    of_tensor_ranks(
        Run(LlamaWide, tp=2, **ONE),
        Run(Decoder, tp=2, **TWO),
        Run(TransposedTied, tp=2, **TWO),
        Run(TokenLosses, tp=2, **TWO),
        Run(Accuracy, tp=2, **TWO),
        Run(LlamaWide, pp=2, tp=2, **TWO),
        Run(LlamaWide, tp=2, **zero(3, reshard_after_forward=True)),
        Run(LlamaWide, tp=2, **ONE, sequence=True),
        Run(LlamaWide, tp=2, **TWO, validate=True),
        Run(BertWide, tp=2, **ONE),
    ),
)
def test_parity_with_a_vocabulary_that_tensor_ranks_shard(worlds, run):
    """A rank has a chunk of its shard of the logits; the numbers are those of one process without either."""
    ranks, expected = check(worlds, run, timeout=600)
    found = {fqn: seen for rank in ranks for fqn, seen in rank.extra.items()}
    [(chunks, reads)] = found.values()
    assert chunks[1] == 3 and not reads
    assert any(plan.vocabulary for rank in ranks for plan in rank.plans.values())
    for rank in ranks:
        assert rank.logged == pytest.approx(expected.logged, rel=1e-9)


@pytest.mark.parametrize("run", [Run(TopAccuracy, tp=2, **TWO)], ids=name_of)
def test_metrics_of_full_logits_over_tensor_ranks(worlds, run):
    ranks, expected = check(worlds, run, timeout=600)
    for rank in ranks:
        assert rank.logged["top"] == pytest.approx(expected.logged["top"], abs=1e-12)
        [(chunks, reads)] = rank.extra.values()
        assert chunks is not None and "topk" in reads


def test_ranks_have_chunks_of_shards(worlds):
    """A chunk of 64 rows of half of the vocabulary is the largest tensor that has one of its sizes."""
    run = Run(LargeVocabulary, tp=2, microbatches=1, batch_size=64, callback=LargestOfSteps, dtype=torch.float32)
    logits = 64 * LENGTH * 512 * 4
    for rank in worlds.run(2, fit, replace(run, strategy={"chunked_loss": 32})):
        assert max(rank.extra) <= logits * WIDTH / 512 * 2


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_low_precision(worlds, precision):
    """As near to float32 as the same precision without chunks is."""
    run = Run(LlamaWide, **ONE, dtype=torch.float32, precision=precision)
    [exact] = worlds.run(1, fit, replace(run, precision=None, strategy={}))
    [plain] = worlds.run(1, fit, replace(run, strategy={}))
    [found] = worlds.run(1, fit, run)
    assert all(chunks is not None for chunks, _ in found.extra.values()) and found.extra
    for name, wanted in exact.grads[0].items():
        scale = float(wanted.abs().max())
        error, usual = (float((r.grads[0][name].float() / r.scale - wanted).abs().max()) for r in (found, plain))
        assert error <= 2 * usual + 1e-3 * scale, name
    assert found.losses[0].dtype == plain.losses[0].dtype


class LargeVocabulary(Lit):
    kind = "tokens"

    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(mlp() for _ in range(4))
        self.head = nn.Linear(WIDTH, 512)

    def loss(self, batch):
        x = self.embedding(batch["input_ids"])
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


class Largest(TorchDispatchMode):
    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if type(value) is torch.Tensor and not value.is_meta:
                self.nbytes = max(self.nbytes, value.untyped_storage().nbytes())
        return out


class LargestOfSteps(Callback):
    """The bytes of the largest result of a kernel in each training step and its backward."""

    def __init__(self):
        self.recorded, self.mode = [], None

    def on_train_batch_start(self, *_):
        self.mode = Largest()
        self.mode.__enter__()

    def on_train_batch_end(self, *_):
        self.mode.__exit__(None, None, None)
        self.recorded.append(self.mode.nbytes)


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}])
def test_no_full_logits(worlds, sizes):
    """With as many chunks as the vocabulary is larger than the features, a chunk is as large as the hidden states."""
    run = Run(LargeVocabulary, **sizes, microbatches=1, batch_size=64, callback=LargestOfSteps, dtype=torch.float32)
    logits = 64 * LENGTH * 512 * 4
    full = worlds.run(run.world_size, fit, run)[-1].extra
    chunked = worlds.run(run.world_size, fit, replace(run, strategy={"chunked_loss": 32}))[-1].extra
    assert min(full) >= logits
    assert max(chunked) <= 2 * logits * WIDTH / 512  # the MLP of a block is that large


@slow
def test_head_inside_of_a_compiled_layer(worlds):
    """The compiler would trace its lazy logits: they are computed in full."""
    run = Run(BertWide, **{**ONE, "strategy": {**CHUNKED, "compile": {"backend": "eager"}}})
    ranks, _ = check(worlds, run, timeout=600)
    assert not ranks[0].extra


@slow
def test_optimizer_in_backward(worlds):
    """Gradients are freed: losses and the state show them."""
    run = Run(LlamaWide, **ONE, num_batches=3)
    expected = worlds.run(1, fit, replace(run, strategy={}, callback=None))[0]
    found = worlds.run(1, fit, replace(run, strategy={**CHUNKED, "optimizer_in_backward": True}))[0]
    assert found.extra
    for name, wanted in expected.state.items():
        torch.testing.assert_close(found.state[name], wanted, rtol=1e-9, atol=1e-11)
    for one, other in zip(found.losses, expected.losses, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=0)


@pytest.mark.parametrize("value", [1, 0, -2, 2.0, "4", None])
def test_values_that_are_refused(value):
    with pytest.raises(ValueError, match=r"chunked_loss=.*; use True, False or a number of chunks of 2 or more"):
        Hybrid3DStrategy(chunked_loss=value)
