"""`verify_first_step=True`: the first step matches one process, or nothing is trained."""

import logging
import re
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core import rank_zero
from torch import nn

from harness.trainer_runs import trainer_of, weights_of
from lightning_hybrid.errors import FirstStepError
from lightning_hybrid.memory import free as memory
from lightning_hybrid.pipeline.runtime.gradients import TiedParameters
from lightning_hybrid.run.execution.first_step import describe_verdict, printed_once
from lightning_hybrid.verify.first_step import Verdict
from models.tiny import FEATURES, Tiny, loader


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class Single(Tiny):
    """In float32."""

    def __init__(self):
        super().__init__()
        self.float()

    def loss(self, batch):
        return nn.functional.mse_loss(self(batch["x"].to(self.dtype)), batch["y"].to(self.dtype))


class Tied(Tiny):
    def __init__(self):
        super().__init__()
        self.layers[3][0].weight = self.layers[0][0].weight


class Dropping(Tiny):
    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.2, self.training)
        return x


class Normalised(Tiny):
    def __init__(self):
        super().__init__()
        self.layers[1].append(nn.BatchNorm1d(FEATURES).double())


class DroppingNormalised(Normalised):
    def forward(self, x):
        return self.layers[-1](nn.functional.dropout(self.layers[:-1](x), 0.2, self.training))


class DroppingWithGroupNorm(Tiny):
    def __init__(self):
        super().__init__()
        self.layers[1].extend([nn.GroupNorm(2, FEATURES).double(), nn.Dropout(0.1)])


class Contrasts(Tiny):
    def loss(self, batch):
        return self(batch["x"]).std()


class EditsGradients(Tiny):
    def on_after_backward(self):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class StoresState(Tiny):
    """The state after its step: running averages, and a list."""

    def __init__(self):
        super().__init__()
        self.layers[1].append(nn.BatchNorm1d(FEATURES).double())
        self.kept = []

    def loss(self, batch):
        out = self(batch["x"])
        self.kept.append(out.detach())
        return nn.functional.mse_loss(out, batch["y"])


class NormalisedTokens(StoresState):
    """BatchNorm, and a mean over labels that are unevenly ignored: those of one microbatch, and of the batch."""

    def loss(self, batch):
        out = self(batch["x"])
        labels = torch.where(batch["index"] % 4 == 0, -100, (batch["y"][:, 0] > 0).long())
        return nn.functional.cross_entropy(torch.cat([out, -out], 1), labels)


class MaskedMean(Tiny):
    """A mean over the entries of a mask, which are unevenly many in the microbatches."""

    def loss(self, batch):
        losses = (self(batch["x"]) - batch["y"]).square().squeeze(1)
        mask = (batch["index"] % 4 != 0).to(losses.dtype)
        return (losses * mask).sum() / mask.sum().clamp(min=1)


class DroppingMaskedMean(MaskedMean):
    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.2, self.training)
        return x


class Gathers(Tiny):
    def loss(self, batch):
        return self.all_gather(super().loss(batch), sync_grads=True).mean()


def fit(module_class, size, pp, options=(), verified=True, **trainer_options):
    """Lines and warnings of a run, and weights after it; or the error and whether anything changed."""
    lines = Lines()
    strategy = {"verify_first_step": verified, **dict(options)}
    module = module_class()
    before = weights_of(module)
    trainer = trainer_of(size, pp, strategy_options=strategy, **{"max_steps": 2, **trainer_options})
    logger = rank_zero.log  # that of the namespace which was imported last
    logger.addHandler(lines)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, loader(4))
    except FirstStepError as error:
        after = weights_of(module)
        same = all(torch.equal(after[n], v) for n, v in before.items() if type(after[n]) is torch.Tensor)
        return str(error), same
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)
    reports = [line for line in lines.lines if "first step" in line]
    return (
        reports,
        [str(w.message) for w in caught if "mixes samples" in str(w.message)],
        module.state_dict(),
        getattr(module, "kept", []),
    )


PP2 = 2, 2, {"num_microbatches": 2}
DP2 = 2, 1, {}
DP2_IN_PARTS = 2, 1, {"num_microbatches": 2}
DP2_PP2 = 4, 2, {"num_microbatches": 2}
TP2 = 2, 1, {"num_microbatches": 2, "tensor_parallel_size": 2}
PP2_TP2 = 4, 2, {"num_microbatches": 2, "tensor_parallel_size": 2}
TWO_STAGES = 2, 2, {"num_microbatches": 2, "stages_per_rank": 2}


def line_of(lines):
    [line] = [line for line in lines if "verified" in line]
    return line


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        pytest.param(Tied, PP2, marks=pytest.mark.slow),  # as with tensor ranks below
        (Dropping, DP2),
        (Dropping, DP2_IN_PARTS),
        (EditsGradients, DP2),
        (Dropping, DP2_PP2),
        (StoresState, PP2),
        (NormalisedTokens, PP2),
        (MaskedMean, DP2_PP2),
        (DroppingMaskedMean, DP2_PP2),
        (Tiny, TWO_STAGES),
        pytest.param(Tiny, TP2, marks=pytest.mark.slow),
        (Tied, PP2_TP2),
    ],
    ids=[
        *(
            "tied-pp2",
            "drop-dp2",
            "drop-dp2-in-parts",
            "edits-dp2",
            "drop-dp2xpp2",
            "keeps-pp2",
            "normalised-pp2",
            "masked-dp2xpp2",
            "drop-masked-dp2xpp2",
            "two-stages",
        ),
        *("tp2", "tied-pp2xtp2"),
    ],
)
def test_correct_step_passes_and_is_unchanged(worlds, module, layout):
    size, pp, options = layout
    results = worlds.run(size, fit, module, size, pp, options)
    expected = worlds.run(size, fit, module, size, pp, options, verified=False)
    count = sum(1 for _ in module().parameters())
    line = line_of(results[0][0])
    assert f"loss and {count} gradients match one process within" in line
    assert float(line.rsplit(maxsplit=1)[1]) < 1e-14
    for (*_, weights, kept), (*_, plain, plain_kept) in zip(results, expected, strict=True):
        assert all(torch.equal(weights[name], plain[name]) for name in plain)
        assert len(kept) == len(plain_kept) and all(map(torch.equal, kept, plain_kept))


@pytest.mark.parametrize(
    ("module", "options", "limit"),
    [
        (Tied, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}, 1e-14),
        (Single, {}, 1e-5),
        (Single, {"precision": "bf16-mixed"}, 4e-2),
        pytest.param(Single, {"precision": "bf16-true"}, 1e-1, marks=pytest.mark.slow),
        (Tiny, {"precision": "64-true"}, 1e-14),
    ],
    ids=["accumulate-clip", "float32", "bf16-mixed", "bf16-true", "float64"],
)
def test_precisions_and_accumulation(worlds, module, options, limit):
    lines, *_ = worlds.run(4, fit, module, 4, 2, {"num_microbatches": 2}, **options)[0]
    assert float(line_of(lines).split("within ")[1].split(";")[0]) < limit


def test_objective_that_mixes_samples_warns_with_both_numbers(worlds):
    lines, warned, *_ = worlds.run(2, fit, Contrasts, *PP2)[0]
    assert line_of(lines)
    [text] = warned
    of_batch, mean = (float(number) for number in re.findall(r" is (\d+\.\d+)", text))
    assert of_batch != pytest.approx(mean, rel=1e-3) and "batches are not split" in text
    assert worlds.run(2, fit, Tiny, *PP2)[0][1] == []
    assert worlds.run(2, fit, Dropping, *PP2)[0][1] == []


def test_rows_of_the_full_batch_draw_the_numbers_of_their_microbatches(worlds):
    [text] = worlds.run(2, fit, DroppingNormalised, *DP2_IN_PARTS)[0][1]
    assert "the mean over its 2 microbatches" in text
    assert "1 BatchNorm layer: fewer microbatches" in text and "sync_batchnorm=True" in text
    assert worlds.run(2, fit, DroppingNormalised, *DP2)[0][1] == []  # replicas alone take a mean as DDP does
    assert worlds.run(2, fit, DroppingWithGroupNorm, *DP2_IN_PARTS)[0][1] == []


def fit_wrongly(module_class, size, pp, options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TiedParameters, "sum_gradients", lambda self: None)
        return fit(module_class, size, pp, options)


def test_wrong_step_is_not_applied(worlds):
    results = worlds.run(2, fit_wrongly, Tied, *PP2)
    for text, unchanged in results:
        assert unchanged
        assert "the gradient of layers.0.0.weight (stage 0, 1, rank 0) is" in text and "in one process" in text
    assert results[0] == results[1]


def fit_without_room(module_class, size, pp, options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_on_host", lambda: 1000.0 if dist.get_rank() == 0 else 1e12)
        return fit(module_class, size, pp, options)


@pytest.mark.parametrize(
    ("run", "module", "text"),
    [
        (fit_without_room, Tiny, " of the first rank, for the full module"),
        (fit, Gathers, "the step communicates with other ranks"),
    ],
)
def test_unsupported_steps_are_refused(worlds, run, module, text):
    for message, unchanged in worlds.run(4, run, module, *DP2_PP2):
        assert text in message and unchanged and "No parameter has changed" in message


class Manual(Tiny):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("num_noise", "precision", "end"),
    [
        (0, "bf16-mixed", "within 2e-08"),
        (22, "bf16-mixed", 'so their check is weak; use precision="32-true" for a sharp one'),
        (
            22,
            "32-true",
            "within 2e-08; 22 of the 26 change by more than 1 % through rounding alone, so their check is weak",
        ),
    ],
)
def test_line_says_how_many_gradients_are_weakly_checked(num_noise, precision, end):
    assert describe_verdict(Verdict("", 2e-8, 26, num_noise), precision).endswith(end)


@pytest.mark.world(1)
def test_manual_optimization_is_refused():
    trainer = trainer_of(1, strategy_options={"verify_first_step": True})
    with pytest.raises(ValueError, match="verify_first_step=True compares gradients before the optimizer steps"):
        trainer.fit(Manual(), loader(4))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_error_is_printed_once_and_without_traceback(monkeypatch, capsys, rank):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error))
    replaced = sys.excepthook
    error = printed_once(FirstStepError("they differ", entry="first-step-differs"), rank)
    other = ValueError("another")
    for one in (error, other):
        sys.excepthook(type(one), one, None)
    assert capsys.readouterr().err == ("" if rank else f"FirstStepError: {error}\n")
    assert shown == [(ValueError, other, None)]
    del error, one
    assert sys.excepthook is replaced
