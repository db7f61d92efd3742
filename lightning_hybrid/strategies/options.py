"""Check what the user asked for as soon as it is asked, before any process is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_hybrid.layout import LayoutError, ParallelLayout
from lightning_hybrid.memory.recompute import check_recompute
from lightning_hybrid.schedule import SCHEDULE_NAMES
from lightning_hybrid.tensor.patterns import check_styles


def check_options(
    sizes: Mapping[str, Any],
    *,
    sequence_parallel: Any,
    recompute: Any,
    schedule: Any,
    num_microbatches: Any,
    stages_per_rank: Any,
    pipeline_cuts: Any,
    batch_splitter: Any,
    microbatch_weight: Any,
    tensor_parallel_plan: Any,
    compile: Any,
) -> None:
    """Refuse options that can be right in no world.

    Args:
        sizes: The user's parallel sizes by name; "auto" stands for what is left.
        sequence_parallel: Whether positions are dealt to tensor ranks.
        recompute: Which layers are computed again.
        schedule: Name of the order of actions.
        num_microbatches: A count or "auto".
        stages_per_rank: A count.
        pipeline_cuts: Module names or None.
        batch_splitter: A function or None.
        microbatch_weight: A function or None.
        tensor_parallel_plan: Module names and styles, or None.
        compile: "units", options of ``torch.compile`` for them, or None.

    Raises:
        LayoutError: A size that is no whole number of 1 or more.
        ValueError: An unknown schedule, style or option of the compiler, or a count that is none.
        TypeError: Cuts that are no list of names, a plan that is none of names and styles, or a splitter that cannot be
            called.
    """
    for name, size in sizes.items():
        is_auto = name == "data_parallel_size" and size == "auto"
        if not is_auto and not _is_count(size):
            also = "'auto' or " if name == "data_parallel_size" else ""
            raise LayoutError(f"{name}={size!r}; use {also}a whole number of 1 or more")
    tensor, context = sizes["tensor_parallel_size"], sizes["context_parallel_size"]
    if sequence_parallel and tensor == 1:
        raise ValueError(
            "sequence_parallel=True deals positions to the ranks of tensor parallelism, and tensor_parallel_size=1; set"
            " tensor_parallel_size=2 or more, or context_parallel_size for ranks that share nothing but positions"
        )
    if tensor > 1 and context > 1:
        raise LayoutError(
            f"tensor_parallel_size={tensor} and context_parallel_size={context} do not go together yet; set one of them"
            " to 1 (tensor_parallel_size with sequence_parallel=True deals positions too)"
        )
    check_recompute(recompute)
    if schedule not in SCHEDULE_NAMES:
        raise ValueError(f"schedule={schedule!r} is unknown; use one of {', '.join(SCHEDULE_NAMES)}")
    if num_microbatches != "auto" and not _is_count(num_microbatches):
        raise ValueError(f"num_microbatches={num_microbatches!r}; use 'auto' or a whole number of 1 or more")
    if not _is_count(stages_per_rank):
        raise ValueError(f"stages_per_rank={stages_per_rank!r}; use a whole number of 1 or more")
    if pipeline_cuts is not None and (
        isinstance(pipeline_cuts, str) or not all(isinstance(name, str) for name in pipeline_cuts)
    ):
        raise TypeError(
            f"pipeline_cuts={pipeline_cuts!r}; use a list with the name of the first module of each stage but the"
            " first, such as ['model.layers.4']"
        )
    if batch_splitter is not None and not callable(batch_splitter):
        raise TypeError(f"batch_splitter={batch_splitter!r}; use function(batch, count) -> list of microbatches")
    if microbatch_weight is not None and not callable(microbatch_weight):
        raise TypeError(f"microbatch_weight={microbatch_weight!r}; use function(microbatch) -> count")
    if tensor_parallel_plan is not None:
        check_styles(tensor_parallel_plan)
    compile_options(compile)


def compile_options(compile: Any) -> dict[str, Any] | None:
    """The options of ``torch.compile`` that a user means.

    Args:
        compile: "units", a mapping, or None.

    Returns:
        None where nothing is compiled.

    Raises:
        ValueError: It is something else, or holds what ``torch.compile`` does not know.
    """
    if compile is None:
        return None
    if compile == "units":
        return {}
    if not isinstance(compile, Mapping):
        raise ValueError(
            f"compile={compile!r}; use None, 'units', or a mapping with options of torch.compile for the units:"
            f" {', '.join(_COMPILE_OPTIONS)}"
        )
    if unknown := sorted(str(name) for name in compile if name not in _COMPILE_OPTIONS):
        raise ValueError(
            f"compile={dict(compile)!r} has {', '.join(unknown)}; allowed are {', '.join(_COMPILE_OPTIONS)}"
        )
    options = {name: value for name, value in compile.items() if value is not None}
    allowed: dict[str, list[Any]] = {"dynamic": [True, False], "fullgraph": [True, False]}
    if isinstance(options.get("backend"), str):
        allowed["backend"] = torch.compiler.list_backends(())
    if options.get("backend", "inductor") == "inductor" and "mode" in options:
        allowed["mode"] = list(torch._inductor.list_mode_options())
    for name, values in allowed.items():
        if name in options and options[name] not in values:
            raise ValueError(f"compile={{{name!r}: {options[name]!r}}} is unknown; allowed are {_listed(values)}")
    if "mode" in options and "options" in options:
        raise ValueError("compile has both a mode and options; torch.compile takes one of them")
    return options


_COMPILE_OPTIONS = ("backend", "mode", "dynamic", "fullgraph", "options")


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def check_module(
    module: pl.LightningModule,
    layout: ParallelLayout,
    layer_sync: Any,
    num_microbatches: int | None,
    *,
    in_parts: bool,
) -> None:
    """Refuse to fit a module that the layout cannot.

    Args:
        module: The user's.
        layout: The sizes.
        layer_sync: What the Trainer made of ``sync_batchnorm``.
        num_microbatches: A count, or None for "auto".
        in_parts: Whether its step is run in parts.

    Raises:
        ValueError: It cannot.
    """
    if layer_sync is not None:
        raise ValueError(
            f"sync_batchnorm=True (layer_sync={type(layer_sync).__name__}) is not there yet: statistics would be those"
            f" of one microbatch of one of the {layout.data_parallel_size} replicas; leave it out, or use GroupNorm or"
            " LayerNorm"
        )
    if in_parts and not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__} uses manual optimization, which cannot be split into stages, microbatches or"
            f" parts of layers (pipeline_parallel_size={layout.pipeline_parallel_size}, tensor_parallel_size="
            f"{layout.tensor_parallel_size}, context_parallel_size={layout.context_parallel_size},"
            f" num_microbatches={num_microbatches or 'auto'}); set pipeline_parallel_size=1,"
            " tensor_parallel_size=1, context_parallel_size=1 and num_microbatches=1"
        )


def _is_count(value: Any) -> bool:
    # bool is an int to Python; here it is always a mistake.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
