"""The techniques of a run, in the order in which they nest around a layer: the first one is the outermost."""

from __future__ import annotations

from typing import Any

from lightning_hybrid.callbacks.slow_links import SlowLinkCallback
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.strategies.options.options import Options
from lightning_hybrid.techniques.technique import Technique


def check_techniques(options: Options, mesh: Mesh, precision: object, *, is_manual: bool) -> None:
    """Refuse options that do not go with this mesh, precision or kind of optimization; errors as of each technique."""
    from lightning_hybrid.techniques.zero import Zero

    Zero.check(options, mesh, precision, is_manual=is_manual)


def techniques_of(run: Any) -> tuple[Technique, ...]:
    """Return the techniques that the user wants, or the layout needs; nothing is decided yet.

    Shards are placed, and layers connected, from the last one outwards: each shards what inner ones leave of a
    parameter. What a run does not use is not imported.
    """
    setting, mesh, found = run.setting, run.mesh, list[Technique]()
    options, trains = setting.options, setting.is_fitting
    if options.chunked_loss is not False:  # outermost: heads are not computed where they are called
        from lightning_hybrid.techniques.logits import ChunkedLosses

        found.append(ChunkedLosses())
    if setting.recompute is not None:  # a repeated forward gathers and exchanges as the first one
        from lightning_hybrid.techniques.recompute import Recomputing

        found.append(Recomputing())
    if trains and (stage := 3 if run.fallback is not None else options.zero_stage):
        from lightning_hybrid.techniques.zero import Zero

        found.append(Zero(stage))  # gathers what experts and tensor ranks have of a layer
    if trains and run.runner is not None and (setting.layout.joins_replicas or mesh.size("tp") > 1):
        from lightning_hybrid.techniques.experts import ExpertParallel

        found += ExpertParallel.of(run)  # exchanges rows between ranks, then runs the local experts
    if trains and setting.saved_activations:  # ZeRO and recomputation take their tensors first
        from lightning_hybrid.techniques.activations import StoredActivations

        found.append(StoredActivations())
    found += options.techniques or ()  # of the user: inside what stores and gathers, around what computes
    if options.compile not in (None, False):  # compiled code has neither gathers nor hooks
        from lightning_hybrid.techniques.compile import CompiledLayers

        found.append(CompiledLayers())
    if run.runner is not None and options.spatial_parallel_size > 1:
        from lightning_hybrid.techniques.spatial import SpatialParallel

        found.append(SpatialParallel(options.spatial_parallel_size))
    elif run.runner is not None and mesh.size("tp") * mesh.size("cp") > 1:
        from lightning_hybrid.techniques.tensor import TensorParallel

        found.append(TensorParallel.of(run))
    if trains and (callbacks := [each for each in setting.trainer.callbacks if isinstance(each, SlowLinkCallback)]):
        from lightning_hybrid.techniques.slow_links.technique import SlowLinks

        found.append(SlowLinks.of(callbacks))  # around no layer
    if trains and options.offloaded:
        from lightning_hybrid.techniques.offload import Offload

        found.append(Offload(options.offloaded))  # around no layer
    return tuple(found)
