"""Lightning's two namespaces, `lightning.pytorch` and `pytorch_lightning`, and the public classes of each."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from lightning_hybrid.namespaces.lightning_internals import check_lightning_internals

# The module of each public class, below the package.
PUBLIC = {
    "Hybrid3DStrategy": "strategies.hybrid3d",
    "HybridPrecision": "precision.hybrid",
    "ActivationCheckpointing": "callbacks.activations",
    "ActivationCompression": "callbacks.activations",
    "ActivationOffload": "callbacks.activations",
    "AdaScale": "callbacks.adascale",
    "ExpertLoadMonitor": "callbacks.expert_load",
    "GradientCompression": "callbacks.slow_link_callbacks",
    "LocalSGD": "callbacks.slow_link_callbacks",
    "GoodputMonitor": "callbacks.monitors.goodput_monitor",
    "MemoryMonitor": "callbacks.monitors.memory_monitor",
    "MoEUpcycle": "callbacks.moe_upcycle",
    "PipelineTimeline": "callbacks.pipeline_timeline",
    "RunPlot": "callbacks.run_plot",
    "ThroughputMonitor": "callbacks.monitors.throughput_monitor",
}


# Modules by their name in the first and in the second namespace, with all their submodules.
_TWINS = (
    ("lightning.pytorch", "pytorch_lightning"),
    ("lightning.fabric", "lightning_fabric"),
    ("lightning_hybrid.strategies", "lightning_hybrid.for_pytorch_lightning.strategies"),
    ("lightning_hybrid.callbacks", "lightning_hybrid.for_pytorch_lightning.callbacks"),
    # The rest of `precision` does not use Lightning, and a user's scaler must be valid for both.
    ("lightning_hybrid.precision.hybrid", "lightning_hybrid.for_pytorch_lightning.precision.hybrid"),
)


@dataclass(frozen=True)
class Namespace:
    """One of Lightning's namespaces.

    Args:
        package: The package with the Trainer.
        top: Its top-level package, which is the one that is installed.
        home: The package from which `PUBLIC`'s modules are imported for it.
        explicit_home: The module that always exports the classes of this namespace, whichever file imports it.
        index: The index in the pairs of `_TWINS`.
    """

    package: str
    top: str
    home: str
    explicit_home: str
    index: int

    def load(self, name: str) -> Any:
        """Import the public class of that name; an ImportError if Lightning lacks a private name that is used."""
        return _load(self, name)

    def counterpart_of(self, module: str) -> str | None:
        """The name that a module of the other namespace has in this one; None if it is of no namespace, or of this."""
        for pair in _TWINS:
            other = pair[1 - self.index]
            if module == other or module.startswith(other + "."):
                return pair[self.index] + module[len(other) :]
        return None


@functools.cache  # a parser of command lines reads each class a thousand times
def _load(namespace: Namespace, name: str) -> Any:
    if name == "Hybrid3DStrategy":
        importlib.import_module(namespace.package)
        check_lightning_internals(namespace.package)
    return getattr(importlib.import_module(f"{namespace.home}.{PUBLIC[name]}"), name)


LIGHTNING = Namespace("lightning.pytorch", "lightning", "lightning_hybrid", "lightning_hybrid.for_lightning", 0)


PYTORCH_LIGHTNING = Namespace(
    "pytorch_lightning",
    "pytorch_lightning",
    "lightning_hybrid.for_pytorch_lightning",
    "lightning_hybrid.for_pytorch_lightning",
    1,
)


NAMESPACES = (LIGHTNING, PYTORCH_LIGHTNING)


def namespace_of(module: str) -> Namespace:
    """The namespace for which a module of this package is loaded, by the module's name."""
    return PYTORCH_LIGHTNING if f"{module}.".startswith(f"{PYTORCH_LIGHTNING.home}.") else LIGHTNING
