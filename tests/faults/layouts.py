"""Inputs of faults that were reported: each runs under each layout, and in one process by the plain Trainer."""

from __future__ import annotations

import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.checkpoint.read import SavedFolder

PP2, TP2, HALVES = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}, {"num_microbatches": 2}
# Ranks, replicas, options of the strategy.
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "dp2": (2, 2, {}),
    "zero1": (2, 2, {"zero_stage": 1}),
    "zero2": (2, 2, {"zero_stage": 2}),
    "zero3": (2, 2, {"zero_stage": 3, "reshard_after_forward": False}),
    "zero3 layerwise": (2, 2, {"zero_stage": 3, "reshard_after_forward": True}),
    "pp2": (2, 1, PP2 | HALVES),
    "pp2, 4 microbatches": (2, 1, PP2 | {"num_microbatches": 4}),
    "tp2": (2, 1, TP2),
    "pp2 x dp2": (4, 2, PP2 | HALVES),
    "tp2 x pp2": (4, 1, TP2 | PP2 | HALVES),
    "zero3 x recompute": (2, 2, {"zero_stage": 3, "recompute": "full"}),
}
FURTHER: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one device": (1, 1, HALVES),
    "tp2 x dp2": (4, 2, TP2),
    "tp2 x pp2 x dp2": (8, 2, TP2 | PP2 | HALVES),
    "tp2 x cp2": (4, 1, TP2 | {"context_parallel_size": 2}),
    "dp4": (4, 4, {}),
}
BATCH, FEATURES = 8, 6


def samples() -> Dataset:
    """Inputs, targets, and a mask; the last batch is short."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(28, FEATURES, generator=generator, dtype=torch.float64)
    mask = (torch.rand(28, 1, generator=generator) > 0.4).double()
    return TensorDataset(x, (x.sum(1, keepdim=True) / 2).tanh(), mask)


class Regression(LightningModule):
    """Four layers and a head. A case changes one thing, and may put what it sees into `seen`, each rank the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(FEATURES, 1)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        x, y, _ = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@dataclass(frozen=True)
class Case:
    """One input; picklable.

    Attributes:
        module: Makes it.
        callbacks: Make callbacks.
        trainer: Arguments of the Trainer.
        strategy: Options of the strategy beside those of a layout.
        data: Makes the samples of training and validation.
        loaders: Makes those of training and validation from a replica's number and the count, instead of `data`.
        epochs: Of the first run.
        validates: Whether the run has a validation.
        saves: Whether files written inside of the run and after it are compared, and a run that resumes the second one.
        tolerance: Relative.
        refused: For layouts under which the input is documented as refused, by name: text of the error.
        layouts: Under which it runs.
        reference: Layout whose numbers are the right ones, where those of replicas are not those of one process.
        compared: What of a run is compared.
    """

    module: Callable[[], LightningModule]
    callbacks: tuple[Callable[[], Callback], ...] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    data: Callable[[], Dataset] = samples
    loaders: Callable[[int, int], Sequence[Any]] | None = None
    epochs: int = 1
    validates: bool = False
    saves: bool = False
    weights_only: bool = True
    tolerance: float = 1e-10
    refused: Mapping[str, str] = field(default_factory=dict)
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    reference: str | None = None
    compared: tuple[str, ...] = ("module", "logged", "seen")


class SavesInside(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def fitted(case: Case, layout: str | None, folder: Path, resumed: Path | None) -> tuple[LightningModule, Trainer]:
    size, replicas, options = (1, 1, {}) if layout is None else (LAYOUTS | FURTHER)[layout]
    strategy = "auto" if layout is None else Hybrid3DStrategy(**options | case.strategy)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    limits = {"max_epochs": case.epochs + (resumed is not None), "num_sanity_val_steps": 0}
    inside = [SavesInside(folder / "inside")] if case.saves and resumed is None else []
    arguments = {"accelerator": "cpu", "devices": size, "num_nodes": 1, "strategy": strategy, **quiet, **limits}
    trainer = Trainer(callbacks=[*(make() for make in case.callbacks), *inside], **arguments | case.trainer)
    torch.manual_seed(0)
    module, data = case.module().double(), case.data()
    # Each replica gets every n-th sample of a batch.
    rank = int(trainer.strategy.cluster_environment.global_rank()) if size > 1 else 0
    # Ranks of a pipeline are the outer ones, tensor ranks the inner ones.
    replica = rank // int(options.get("tensor_parallel_size", 1)) % replicas
    if case.loaders is not None:
        train, *validation = case.loaders(replica, replicas)
        trainer.fit(module, train, validation or None, ckpt_path=resumed)
        return module, trainer
    sampler = DistributedSampler(data, replicas, replica, shuffle=False) if replicas > 1 else None
    loaders = [DataLoader(data, BATCH // replicas, sampler=sampler) for _ in range(1 + case.validates)]
    trainer.fit(module, *loaders, ckpt_path=resumed, weights_only=case.weights_only)
    return module, trainer


def result_of(case: Case, module: LightningModule, trainer: Trainer) -> dict[str, Any]:
    result = {
        "module": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "seen": getattr(module, "seen", []),
    }
    return {name: result[name] for name in case.compared}


def fit(case: Case, layout: str | None, folder: Path | None = None) -> dict[str, Any]:
    """On a rank: the run, and the one that resumes it; the first rank adds what their files hold."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if folder is None:
        with tempfile.TemporaryDirectory() as made:
            return fit(case, layout, Path(made))
    module, trainer = fitted(case, layout, folder, None)
    result: dict[str, Any] = {"run": result_of(case, module, trainer)}
    if case.saves:
        trainer.save_checkpoint(folder / "after")
        result["resumed"] = result_of(case, *fitted(case, layout, folder, folder / "after"))
        if trainer.global_rank == 0 and (folder / "after").is_file():
            result["files"] = {when: contents(folder / when, case.weights_only) for when in ("inside", "after")}
    return result


def contents(path: Path, weights_only: bool) -> dict[str, Any]:
    file = SavedFolder(path).checkpoint() if path.is_dir() else torch.load(path, weights_only=weights_only)
    return {
        key: file[key] for key in ("state_dict", "optimizer_states", "callbacks", "hyper_parameters") if key in file
    }


def refusal(case: Case, layout: str, folder: Path) -> str:
    """On a rank: type and text of the error."""
    try:
        fit(case, layout, folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def differences(got: Any, expected: Any, tolerance: float, path: str = "") -> Iterator[str]:
    """Places at which two trees of numbers differ."""
    if isinstance(expected, Mapping):
        if not isinstance(got, Mapping) or got.keys() != expected.keys():
            yield f"{path}: {sorted(map(str, got))} for {sorted(map(str, expected))}"
            return
        for key in expected:
            yield from differences(got[key], expected[key], tolerance, f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        if len(got) != len(expected):
            yield f"{path}: {len(got)} entries for {len(expected)}"
            return
        for index, pair in enumerate(zip(got, expected, strict=True)):
            yield from differences(*pair, tolerance, f"{path}/{index}")
    elif isinstance(expected, Tensor):
        if got.shape != expected.shape or got.dtype != expected.dtype:
            yield f"{path}: {got.dtype} {tuple(got.shape)} for {expected.dtype} {tuple(expected.shape)}"
        elif not torch.allclose(got, expected, rtol=tolerance, atol=tolerance / 10, equal_nan=False):
            yield f"{path}: off by {float((got.double() - expected.double()).abs().max()):.2g}"
    elif isinstance(expected, float):
        if not math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance / 10):
            yield f"{path}: {got} for {expected}"
    elif isinstance(expected, nn.Module):  # a copy in hyperparameters; metrics of replicas hold their own states
        if type(got) is not type(expected):
            yield f"{path}: {got} for {expected}"
    elif got != expected:
        yield f"{path}: {got!r} for {expected!r}"


def check(worlds: Any, case: Case, layout: str, folder: Path, *, timeout: float = 60) -> None:
    """Compare all ranks with one process, or the refusal with the documented one."""
    size = (LAYOUTS | FURTHER)[layout][0]
    if layout in case.refused:
        for text in worlds.run(size, refusal, case, layout, folder, timeout=timeout):
            assert case.refused[layout] in text, text
        return
    expected = worlds.run_once(1 if case.reference is None else 2, fit, case, case.reference, timeout=timeout)[0]
    ranks = worlds.run(size, fit, case, layout, folder, timeout=timeout)
    if case.saves and "files" not in ranks[0]:
        ranks[0]["files"] = {when: contents(folder / when, case.weights_only) for when in ("inside", "after")}
    for rank, result in enumerate(ranks):
        wanted = {key: expected[key] for key in result}
        found = list(differences(result, wanted, case.tolerance))
        assert not found, f"rank {rank} under {layout}: {found[:6]}"


def each(
    cases: Mapping[str, Case], default: Mapping[str, tuple[str, ...]], layouts: Sequence[str] = ()
) -> pytest.MarkDecorator:
    """Run a test for each case under its layouts, or under these: by default under those named, else as slow tests."""
    assert default.keys() <= cases.keys()
    return pytest.mark.parametrize(
        ("case", "layout"),
        [
            pytest.param(case, layout, id=f"{name}-{layout}", marks=[pytest.mark.slow] * (layout not in kept))
            for name, case in cases.items()
            for kept in [default.get(name, ())]
            for layout in layouts or case.layouts
        ],
    )
