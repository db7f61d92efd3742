"""Callback that logs and plots the load balance of experts in every MoE layer.

Layers are `MoE`, upcycled ones included, and third-party routers that return the indices of the chosen experts. The
load of a call is a side output of the layer, so that it is counted once: by the rank that computes the layer, and not
again in a recomputation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_hybrid.callbacks.expert_load_plot import LoadHistory, draw_loads
from lightning_hybrid.callbacks.moe_upcycle import MoEUpcycle
from lightning_hybrid.callbacks.pictures import check_counts, log_picture, plot_path
from lightning_hybrid.experts.metrics import balance_of, entropy_of_load, shares_of
from lightning_hybrid.experts.moe.moe_layer import MoE
from lightning_hybrid.experts.moe.upcycling import UpcycledMLP
from lightning_hybrid.patching import around_method
from lightning_hybrid.soft_failures import only_informs
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.step.tracing.collect_side_outputs_of_modules import give_aside, taking_asides

_WHAT = "ExpertLoadMonitor"


class LayerLoad(NamedTuple):
    """Load statistics of one call of a layer, emitted as a side output.

    Attributes:
        layer: Name of the layer.
        load: [E] pairs (token, expert) routed to each expert, before drops.
        dropped: [] pairs dropped for lack of capacity.
        entropy: [] mean entropy of the router, in nats.
    """

    layer: str
    load: Tensor
    dropped: Tensor
    entropy: Tensor


class ExpertLoadMonitor(Callback):
    """Logs the load of the experts in training, and plots it as a heat map at the end.

    Every n steps it logs, over all tokens routed since: "expert_balance", the maximum load over the mean load, of the
    worst layer; "expert_dropped", the share of pairs (token, expert) that was dropped; and for each layer
    "expert_load/LAYER/balance", ".../load_entropy", ".../router_entropy" and ".../dropped". The sums of all ranks are
    then added in one small all-reduce.

    Args:
        path: File of the plot (PNG, SVG or PDF; needs matplotlib); no plot if None.
        every_n_steps: Steps of the optimizer between two measurements.

    Raises:
        TypeError: ``every_n_steps`` is no int.
        ValueError: ``every_n_steps`` is below 1, or the path has another suffix.
    """

    def __init__(self, path: str | Path | None = None, every_n_steps: int = 50) -> None:
        self.path = None if path is None else plot_path(path, "expert_load.png")
        check_counts(every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self.history = LoadHistory()
        self._sums: dict[str, Tensor] = {}  # by layer [E + 3]: load of each expert, dropped, entropy, number of calls
        self._unwraps: list[Callable[[], None]] = []
        self._last_step = 0

    # -- recording ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wraps the MoE layers, before any strategy inspects the module.

        Raises:
            ValueError: There are no such layers.
        """
        if stage != "fit":
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, MoEUpcycle):  # it may stand after this one
                callback.setup(trainer, pl_module, stage)
        layers = dict(find_layers(pl_module))
        if not layers:
            raise ValueError(
                f"ExpertLoadMonitor finds no experts in {type(pl_module).__name__}: no MoE, and no router that has"
                " num_experts and top_k; leave it out, or build the layers before fit"
            )
        self._stop()
        self.history = LoadHistory()
        self._sums = {name: torch.zeros(size + 3, dtype=torch.float64) for name, (_, size, _) in layers.items()}
        for name, (layer, size, describe) in layers.items():
            self._wrap_layer(name, layer, size, describe)
        self._unwraps.append(around_method(pl_module, "training_step", self._collect, reason="collects loads"))

    def _wrap_layer(self, name: str, layer: nn.Module, size: int, describe: Describe) -> None:
        def emit(layer: nn.Module, run: Callable[[], Any]) -> Any:
            out = run()
            with only_informs(_WHAT):
                if layer.training and (statistics := describe(out, size)) is not None:
                    give_aside(LayerLoad(name, *statistics))
            return out

        self._unwraps.append(around_method(layer, "forward", emit, reason="emits loads"))

    def _collect(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        with taking_asides(LayerLoad) as side_outputs:
            output = run()
        self._add(side_outputs)
        return output

    @only_informs(_WHAT)
    def _add(self, side_outputs: Iterable[LayerLoad]) -> None:
        for call in side_outputs:
            if not is_absent(call.load):  # else another rank counts it, or the step is only recorded
                with torch._C.DisableTorchFunction(), torch.no_grad():  # not recorded as an operation of the step
                    row = torch.cat([call.load.double(), call.load.new_tensor([1.0]).double()])
                    row = torch.cat([row[:-1], torch.stack([call.dropped, call.entropy]).double(), row[-1:]])
                    self._sums[call.layer] = self._sums[call.layer].to(row.device) + row

    def _stop(self) -> None:
        while self._unwraps:
            self._unwraps.pop()()

    # -- measuring ----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts to count steps."""
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the load every ``every_n_steps`` steps; collective."""
        step = trainer.global_step
        if step >= self._last_step + self.every_n_steps:
            self._measure(trainer, pl_module, step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the load of the remaining steps, and plots."""
        if trainer.global_step > self._last_step:
            self._measure(trainer, None, trainer.global_step)
        self._plot(trainer)

    @only_informs(_WHAT)
    def _plot(self, trainer: Trainer) -> None:
        if self.path is not None and trainer.is_global_zero and self.history.steps:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            figure = draw_loads(self.history, self.path)
            log_picture(trainer.loggers, "expert_load", lambda: figure, trainer.global_step)
            rank_zero_info(f"the load of the experts is plotted in {self.path}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Unwraps the layers and the training step."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Unwraps the layers and the training step."""
        self._stop()

    def _measure(self, trainer: Trainer, module: LightningModule | None, step: int) -> None:
        self._last_step = step
        sums = self._gathered(trainer)
        for name in self._sums:
            self._sums[name] = torch.zeros_like(self._sums[name])
        self._log(trainer, module, step, sums)

    @only_informs(_WHAT)
    def _log(self, trainer: Trainer, module: LightningModule | None, step: int, sums: dict[str, Tensor]) -> None:
        logged: dict[str, float] = {}
        balances, dropped, pairs = [], 0.0, 0.0
        for name, row in sums.items():
            load, (layer_dropped, entropy, count) = row[:-3], row[-3:].tolist()
            if count == 0:
                continue
            balances.append(float(balance_of(load)))
            dropped, pairs = dropped + layer_dropped, pairs + float(load.sum())
            prefix = f"expert_load/{name}"
            logged[f"{prefix}/balance"] = balances[-1]
            logged[f"{prefix}/load_entropy"] = float(entropy_of_load(load))
            logged[f"{prefix}/dropped"] = layer_dropped / max(1.0, float(load.sum()))
            if math.isfinite(entropy):
                logged[f"{prefix}/router_entropy"] = entropy / count
        if not balances:
            return
        overall = {"expert_balance": max(balances), "expert_dropped": dropped / max(1.0, pairs)}
        self.history.add(step, {name: shares_of(row[:-3]).tolist() for name, row in sums.items()})
        if module is not None:
            for key, value in overall.items():
                module.log(key, value, on_step=True, on_epoch=False, rank_zero_only=False)
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=step)

    def _gathered(self, trainer: Trainer) -> dict[str, Tensor]:
        """Sums over all ranks. Each replica of a layer is counted; the shares do not depend on their number."""
        strategy: Any = trainer.strategy
        flat = torch.cat([row.to(strategy.root_device) for row in self._sums.values()])
        mesh = getattr(strategy, "mesh", None)
        if mesh is not None:
            mesh.all_reduce(flat, "world")
        elif trainer.world_size > 1:
            flat = strategy.reduce(flat, reduce_op="sum")
        rows = flat.cpu().split([len(row) for row in self._sums.values()])
        return dict(zip(self._sums, rows, strict=True))


# -- layers with experts ----------------------------------------------------------------------------------------------

Describe = Callable[[Any, int], "tuple[Tensor, Tensor, Tensor] | None"]


def find_layers(root: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, int, Describe]]]:
    """Yields the MoE layers: name, module to wrap, number of experts, function from a call's result to its load."""
    inside: set[int] = set()
    for name, module in root.named_modules():
        if id(module) in inside:
            continue
        if isinstance(module, UpcycledMLP):
            inside.update(map(id, module.modules()))
            yield name, (module.moe, module.num_experts, _of_report)
        elif isinstance(module, MoE):
            inside.update(map(id, module.modules()))
            yield name, (module, module.router.num_experts, _of_report)
        elif (size := _experts_of_router(module)) is not None:
            yield name, (module, size, functools.partial(_of_indices, top_k=module.top_k))


def _of_report(out: Any, size: int) -> tuple[Tensor, Tensor, Tensor]:
    _, report = out
    return report.load, report.dropped, report.entropy


def _experts_of_router(module: nn.Module) -> int | None:
    """Returns the number of experts of a router: a module with one matrix, a row for each expert; None for others."""
    size, top_k = getattr(module, "num_experts", None), getattr(module, "top_k", None)
    weights = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    is_router = isinstance(size, int) and isinstance(top_k, int) and len(weights) == 1 and weights[0].shape[0] == size
    return size if is_router else None


def _of_indices(out: Any, size: int, top_k: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Computes the load from the expert indices [tokens, k] that a router returns; None if it returns none."""
    for leaf in out if isinstance(out, tuple | list) else ():
        if isinstance(leaf, Tensor) and leaf.dtype == torch.int64 and leaf.dim() and leaf.shape[-1] == top_k:
            flat = leaf.reshape(-1)
            load = flat.new_zeros(size).scatter_add_(0, flat, torch.ones_like(flat)).float()
            return load, load.new_zeros(()), load.new_full((), math.nan)
    return None
