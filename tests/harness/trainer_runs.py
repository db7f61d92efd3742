"""A tiny LightningModule, its data, and its runs on a rank for tests of the Trainer."""

import contextlib
import logging
import warnings

import torch
from lightning.pytorch import Trainer
from lightning_utilities.core import rank_zero

import lightning_hybrid
from models.regression import regression_data


def trainer_of(size=1, pp=1, **options):
    """A quiet Trainer on this rank: hybrid3d over `size` ranks, or Lightning's own strategy for size 1 and pp 1."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy_options = options.pop("strategy_options", {})
    if size > 1 or strategy_options:
        strategy = lightning_hybrid.Hybrid3DStrategy(**{"pipeline_parallel_size": pp, **strategy_options})
    else:
        strategy = "auto"
    defaults = {
        "accelerator": "cpu",
        "devices": size,
        "num_nodes": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "strategy": strategy,
    }
    return Trainer(**{**defaults, **options})


def weights_of(module):
    """Every parameter by name."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_same(result, expected, *, rtol=1e-10, atol=1e-12):
    """Asserts the same numbers under the same names."""
    assert set(result) == set(expected)
    far = {
        name: (result[name], expected[name])
        for name in expected
        if not torch.allclose(
            torch.as_tensor(result[name], dtype=torch.float64),
            torch.as_tensor(expected[name], dtype=torch.float64),
            rtol=rtol,
            atol=atol,
        )
    }
    assert not far


def ignore_warnings():
    """For a run whose warnings another test is about."""
    warnings.simplefilter("ignore")


@contextlib.contextmanager
def lines_of_lightning(*, as_printed=False):
    """The log lines inside on this rank, unwrapped unless ``as_printed``; make the Trainer before.

    Where `pytorch_lightning` has been imported too, what either package says on the first rank is logged by that one.
    """
    lines, handler = [], logging.Handler()
    joint = "\n    " if as_printed else " "
    handler.emit = lambda record: lines.append(record.getMessage().replace("\n    ", joint))
    loggers = {logging.getLogger(name) for name in ("lightning.pytorch", ".".join(rank_zero.log.name.split(".")[:2]))}
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.setLevel(logging.ERROR)


def fit_until_error(module, pp):
    ignore_warnings()
    torch.manual_seed(0)
    model = module().double()
    before = [p.detach().clone() for p in model.parameters()]
    try:
        trainer_of(2 * pp, pp).fit(model, regression_data()["train_dataloaders"])
    except Exception as error:
        pairs = [(a, b) for a, b in zip(before, model.parameters(), strict=True) if a.shape == b.shape]
        moved = any(not torch.equal(a, b.detach()) for a, b in pairs if type(b.data) is torch.Tensor)
        return type(error).__name__, str(error), moved
    return "", "nothing was refused", True
