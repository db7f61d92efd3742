"""Architectures sampled from transformers, with options of their users, under layouts sampled for each."""

import functools
import inspect
import random

import pytest
import torch
from torch.utils.data import DataLoader

from harness.verification import LAYOUTS, check
from lightning_hybrid.verify import Layout
from models.sampled.architectures import Drawn, Unavailable, candidates, make

SEED, COUNT, SAMPLES = 31, 130, 16  # about half of these run in one process, tiny
MICROBATCHED = Layout("pp2 x 4", devices=2, strategy={"pipeline_parallel_size": 2, "num_microbatches": 4})
ROUTED = {"JetMoeForCausalLM"}  # a small loss of routers on its own adds to that of labels, of which some are ignored
PLACES = [
    LAYOUTS[0],
    MICROBATCHED,
    Layout("dp2", devices=2, strategy={}),
    Layout("zero3", devices=2, strategy={"zero_stage": 3}),
    Layout("zero3 by layer", devices=2, strategy={"zero_stage": 3, "reshard_after_forward": True}),
    Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2}),
]


@functools.cache
def classes():
    """The classes in a drawn order; which of them run in one process shows when they are made."""
    return [class_name for _, class_name in candidates(SEED)]


class WithOptions(Drawn):
    """With hidden states, the logits of routers, and checkpointing, as its name draws them."""

    def __init__(self, model, draw):
        super().__init__(model)
        for option in ("output_hidden_states", "output_router_logits"):
            if draw.random() < 0.5 and hasattr(model.config, option):
                setattr(model.config, option, True)
        if draw.random() < 0.3 and getattr(model, "supports_gradient_checkpointing", False):
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def varied(batch, model, draw):
    """More samples than were drawn, each with ignored labels and its own padding."""
    size = len(next(iter(batch.values())))
    rows = {name: value[torch.arange(SAMPLES) % size].clone() for name, value in batch.items()}
    ids = rows.get("input_ids")
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    lengths = [draw.randint(3, 8) for _ in range(SAMPLES)]
    if takes_mask and ids is not None and ids.dim() == 2 and draw.random() < 0.5:
        rows["attention_mask"] = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
    labels = rows.get("labels")
    if labels is not None and labels.dim() == 2:
        for row in range(SAMPLES):
            labels[row, : draw.randint(0, labels.shape[1] - 2)] = -100
    return rows


@functools.lru_cache(maxsize=2)
def made(class_name):
    """Module and samples of a class, the same in every process.

    Raises:
        Unavailable: It does not run in one process.
    """
    draw = random.Random(class_name)
    drawn, batch = make(class_name)
    try:
        module = WithOptions(drawn.model, draw)
        rows = varied(batch, module.model, draw)
        loss = module.training_step({name: value[:4] for name, value in rows.items()})
        if not torch.isfinite(loss):
            raise Unavailable("no number")
        loss.backward()
    except Unavailable:
        raise
    except Exception as error:
        raise Unavailable(str(error)) from error
    module.zero_grad()
    precise = {loss.dtype, *(p.dtype for p in module.parameters())} == {torch.float64}
    return module, rows, "64-true" if precise else "32-true"


class Make:
    """Makes the module, or the data, of a class in another process."""

    def __init__(self, class_name, what):
        self._class_name, self._what = class_name, what

    def __call__(self):
        made.cache_clear()  # a run changes its arguments
        module, rows, _ = made(self._class_name)
        if self._what == "module":
            return module
        samples = [{name: value[index] for name, value in rows.items()} for index in range(SAMPLES)]
        return {"train_dataloaders": DataLoader(samples, batch_size=4)}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(COUNT))
def test_matches_one_process(worlds, number):
    class_name = classes()[number]
    try:
        precision = made(class_name)[2]
    except Unavailable as error:
        pytest.skip(f"{class_name} does not run in one process: {error}")
    layout = PLACES[number % len(PLACES)]
    options = {"steps": 2, "precision": precision, "timeout": 120, "num_microbatches": 1 if number % 2 else 2}
    report = check(worlds, Make(class_name, "module"), layout, make_data=Make(class_name, "data"), **options)
    if report.outcome == "different" and report.first.difference < 1e-8 and precision == "64-true":
        # Something inside computes in float32 under any precision, and rounds as its shards do.
        options["precision"] = "32-true"
        report = check(worlds, Make(class_name, "module"), layout, make_data=Make(class_name, "data"), **options)
    if report.outcome == "different" and class_name in ROUTED:
        # The loss of the routers mixes the samples of a microbatch, whose weight is its number of labels.
        options["num_microbatches"] = 1
        report = check(worlds, Make(class_name, "module"), layout, make_data=Make(class_name, "data"), **options)
    assert report.outcome == "same", f"{class_name}: {report}"
