"""Figures of Lightning's ThroughputMonitor per device and over all devices, where several devices hold one replica."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import ThroughputMonitor

from lightning_hybrid.patching import around

_RATES = ("batches_per_sec", "samples_per_sec", "items_per_sec", "flops_per_sec")


def count_devices_in_throughput(trainer: Any, world_size: int, num_replicas: int) -> Callable[[], None]:
    """Let each ThroughputMonitor of the trainer divide its figures per device by the devices of a replica.

    The monitor counts the batches and FLOPs of one replica, and multiplies by the number of replicas. It takes the
    result of one replica for that of one device: with two stages its MFU would be twice too high.

    Returns:
        The undo.
    """
    undo = contextlib.ExitStack()
    devices = world_size // num_replicas
    for callback in trainer.callbacks if devices > 1 else ():
        if isinstance(callback, ThroughputMonitor):
            for throughput in callback._throughputs.values():

                def compute(original: Callable[[], dict[str, Any]], separator: str = throughput.separator) -> Any:
                    return _per_device(original(), f"device{separator}", devices)

                undo.callback(around(throughput, "compute", compute, reason="several devices hold one replica"))
    return undo.close


def _per_device(metrics: dict[str, Any], prefix: str, devices: int) -> dict[str, Any]:
    """Return the metrics with a replica's numbers, named as a device's, divided by its devices."""
    # Lightning leaves out figures over all devices where it counts one.
    over_all = {name: metrics[prefix + name] for name in _RATES if prefix + name in metrics and name not in metrics}
    per_device = {name: value / devices for name, value in metrics.items() if name.startswith(prefix)}
    return {**metrics, **over_all, **per_device}
