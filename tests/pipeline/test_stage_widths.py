"""Stages that several ranks hold, against one process."""

from functools import partial

import pytest
from torch.utils.data import DataLoader

from harness.verification import check
from lightning_hybrid.verify import Layout
from models.cases import CASES, Samples
from models.hand_written import Layers


def layout(*widths, tensor=1, **options):
    options = {"stage_widths": list(widths), "tensor_parallel_size": tensor, **options}
    return Layout(f"{' + '.join(map(str, widths))}, tp{tensor}", sum(widths) * tensor, options)


def data_of(kind, batch=8):
    train, val = (DataLoader(Samples(kind, count), batch_size=batch) for count in (2 * batch, batch))
    return {"train_dataloaders": train, "val_dataloaders": val}


def same(worlds, make_module, layout, **options):
    options = {"make_data": partial(data_of, make_module.kind), "num_microbatches": None, **options}
    report = check(worlds, make_module, layout, **options)
    assert report.outcome == "same", str(report)


@pytest.mark.parametrize("widths", [(2, 1), (1, 2), (2, 2), (3,)], ids=str)
def test_layers(worlds, widths):
    same(worlds, Layers, layout(*widths, num_microbatches=4))


@pytest.mark.parametrize("name", [name for name in CASES if name != "Layers"])
@pytest.mark.parametrize("widths", [(2, 1), (1, 2)], ids=str)
def test_cases(worlds, name, widths):
    same(worlds, CASES[name], layout(*widths, num_microbatches=4))
