"""Users' copies and pickles during and after fit: full values, without a trace of this package."""

import copy
import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from lightning_hybrid.errors import NotOnThisRank
from models.pickled_objects import IN_BATCH, KINDS, WHEN, Writes, data, made, write
from models.tiny import Tiny, loader

TESTS = Path(__file__).parents[2]
LAYOUTS = {
    "one device": (1, 1, {"num_microbatches": 1}),
    "microbatches": (1, 1, {"num_microbatches": 2}),
    "dp2": (2, 1, {"num_microbatches": 1}),
    "zero3": (2, 1, {"zero_stage": 3}),
    "tp2": (2, 1, {"tensor_parallel_size": 2}),
    "pp2": (2, 2, {"num_microbatches": 1}),
    "pp2 with microbatches": (2, 2, {"num_microbatches": 2}),
}


@pytest.fixture(scope="module")
def load_without_package():
    """Loads a pickle in a process where this package is not installed, and returns its content."""
    command = [sys.executable, str(TESTS / "models" / "pickled_objects.py")]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:

        def load(path):
            process.stdin.write(f"{path}\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith("loaded "):
                    return json.loads(line.removeprefix("loaded "))
            raise AssertionError(f"{path} does not load:\n{process.stderr.read()[-3000:]}")

        yield load
        process.stdin.close()


def fit(folder, size, pp, options, norm, reference_of_replicas):
    ignore_warnings()
    module = made(norm)
    prefix = os.environ.get("RANK", "0") if size > 1 else "0"
    callback = Writes(f"{folder}/{prefix}")
    kwargs = {"logger": True, "default_root_dir": folder, "callbacks": [callback], "limit_val_batches": 2}
    trainer = trainer_of(size, pp, strategy_options=options, **kwargs)
    replicas = size // pp // options.get("tensor_parallel_size", 1)
    trainer.fit(module, *data(4 // replicas, reference_of_replicas))
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    write(trainer, module, "after")


def without_metric(tree):
    if isinstance(tree, dict):
        for key in ("metric", "value", "tp", "fp", "tn", "fn"):
            tree.pop(key, None)
        for value in tree.values():
            without_metric(value)


def differences(found, expected, path=""):
    """Differing paths of two trees of numbers."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(found.keys() | expected.keys()):
            if key not in found or key not in expected:
                yield f"{path}/{key} is in one only"
            else:
                yield from differences(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from differences(one, other, f"{path}/{index}")
    elif isinstance(expected, float) and isinstance(found, float):
        if found != pytest.approx(expected, rel=1e-10, abs=1e-12):
            yield f"{path}: {found} and not {expected}"
    elif found != expected:
        yield f"{path}: {found} and not {expected}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pickles_are_full_and_load_without_the_package(worlds, tmp_path, load_without_package, layout):
    size, pp, options = LAYOUTS[layout]
    replicas = size // pp // options.get("tensor_parallel_size", 1)
    norm = replicas == 1 and options.get("num_microbatches", 1) == 1  # else its statistics are another batch's
    one, parts = tmp_path / "one", tmp_path / "parts"
    for folder in (one, parts):
        folder.mkdir()
    worlds.run(1, fit, str(one), 1, 1, {}, norm, replicas > 1)
    worlds.run(size, fit, str(parts), size, pp, options, norm, False)
    far = []
    names = [f"{rank}.{when}.{kind}" for rank, when, kind in itertools.product(range(size), WHEN, KINDS)]
    names += [f"{rank}.batch.{kind}" for rank, kind in itertools.product(range(size), IN_BATCH)]
    for name in (*names, "batch.ckpt", "after.ckpt"):
        expected, found = load_without_package(one / name.replace("1.", "0.")), load_without_package(parts / name)
        if replicas > 1:  # each replica has counted local samples
            for holder in (found, expected):
                without_metric(holder)
        if replicas > 1 and name.endswith(("batch", "outputs")):  # of local samples
            continue
        far += list(differences(found, expected, name))
    assert not far, "\n".join(far)


class Teacher(Tiny):
    """Makes a teacher in its first step, and learns to agree with it."""

    def __init__(self):
        super().__init__()
        self.teacher = None

    def training_step(self, batch, batch_idx):
        if self.teacher is None:
            self.teacher = [copy.deepcopy(self.layers).requires_grad_(False)]
        return self.loss(batch) + (self(batch["x"]) - self.teacher[0](batch["x"])).square().mean()


class TeacherOfDropout(Teacher):
    """Its layers draw: a draw is keyed by the name of its layer."""

    def __init__(self):
        super().__init__()
        self.layers.insert(2, nn.Dropout(0.0))


def taught(options, kind):
    ignore_warnings()
    module = kind()
    trainer_of(1, 1, strategy_options=options).fit(module, loader(4))
    return weights_of(module), weights_of(kind())


@pytest.mark.parametrize("kind", [Teacher, TeacherOfDropout], ids=lambda kind: kind.__name__)
def test_copy_made_in_a_step_uses_its_own_weights(worlds, kind):
    [(expected, before)] = worlds.run(1, taught, {}, kind)
    [(found, _)] = worlds.run(1, taught, {"recompute": "full"}, kind)
    assert_same(found, expected)
    assert any(not torch.equal(before[name], expected[name]) for name in before)


class PicklesInStep(Tiny):
    def training_step(self, batch, batch_idx):
        pickle.dumps(self.layers)
        return super().training_step(batch, batch_idx)


class PicklesOnFirst(Tiny):
    """Only the first rank pickles."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def on_train_batch_end(self, *_):
        if self.trainer.is_global_zero:
            pickle.dumps(self if self.what == "module" else self.trainer.optimizers[0])


def outcome_of(size, pp, options, make, *args):
    ignore_warnings()
    module = make(*args)
    try:
        trainer_of(size, pp, strategy_options=options).fit(module, loader(4, 8))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


OPERATIONS = {
    "in a step": (PicklesInStep,),
    "the module on one rank": (PicklesOnFirst, "module"),
    "an optimizer on one rank": (PicklesOnFirst, "optimizer"),
}
FULL = "in a step", "zero3"  # gathered there
OUTCOMES = {"in a step": "is pickled where it has no content", "the module on one rank": "read them on every rank"}
OUTCOMES["an optimizer on one rank"] = "a copy or pickle of AdamW on rank 0 needs all 2 ranks"


@pytest.mark.parametrize(
    ("operation", "layout"),
    [(operation, layout) for operation in OPERATIONS for layout in ("zero3", "pp2") if (operation, layout) != FULL],
)
def test_incomplete_copy_is_an_error_within_seconds(worlds, layout, operation):
    size, pp, options = LAYOUTS[layout]
    outcome = worlds.run(
        size, outcome_of, size, pp, {**options, "strict_layout": True}, *OPERATIONS[operation], timeout=30
    )
    assert OUTCOMES[operation] in outcome[0]
    assert all(each != "nothing" for each in outcome)


class CopiesModule(Callback):
    """Stores a copy of the module, as weight averaging does."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.copy = copy.deepcopy(pl_module)


def copied_after_fit(size, options):
    """The error for a copy after fit, and the copy's weights, pickled."""
    ignore_warnings()
    module, callback = Tiny(), CopiesModule()
    pp = size if "zero_stage" not in options else 1
    trainer_of(size, pp, strategy_options=options, callbacks=[callback]).fit(module, loader(4 // (size // pp), 16))
    assert any(callback.copy.layers[0][0].forward.__self__ is each for each in callback.copy.modules())
    try:
        return "", weights_of(pickle.loads(pickle.dumps(callback.copy))), weights_of(module)
    except NotOnThisRank as error:
        with pytest.raises(RuntimeError, match=r"state_dict\(\) was called while"):
            callback.copy.state_dict()
        return str(error), None, None


def test_copy_made_in_a_hook_is_full_if_shards_are_gathered(worlds):
    for outcome, weights, trained in worlds.run(2, copied_after_fit, 2, {"zero_stage": 3}):
        assert outcome == ""
        assert_same(weights, trained)


def test_copy_made_in_a_hook_over_stages_is_full_after_fit(worlds):
    for outcome, weights, trained in worlds.run(2, copied_after_fit, 2, {"num_microbatches": 2}):
        assert outcome == ""
        assert_same(weights, trained)
