"""The explanation of an out-of-memory error: where it arose, and which tensors hold the memory of this rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, TracebackType

from torch import nn

from lightning_hybrid.callbacks.monitors.draw_rank_memory import format_bytes
from lightning_hybrid.callbacks.monitors.memory_of_tensors import Holder, bytes_by_kind
from lightning_hybrid.errors import causes_of
from lightning_hybrid.memory.estimate_rank_memory import RankMemory

_ADVICE = (
    'what takes less memory: recompute="full" for activations, more num_microbatches with stages, zero_stage=3 for'
    ' parameters, gradients and states, offload="cpu"; lightning-hybrid explain predicts a layout'
)


def explain_out_of_memory(
    error: BaseException,
    module: nn.Module,
    holders: Sequence[Holder],
    *,
    rank: int,
    predicted: RankMemory | None,
    saved_by_layer: Mapping[str, int],
    num_largest: int,
) -> str:
    """Describe what holds memory on this rank when an allocation has failed.

    Args:
        error: With its traceback.
        module: The user's module.
        holders: Parameters, gradients and optimizer states on this rank's device.
        rank: Global rank.
        predicted: Memory of this rank by its plan, if it is known.
        saved_by_layer: Bytes that each layer saves for the backward of one microbatch, where the step is recorded.
        num_largest: How many of each kind to name.
    """
    sums = bytes_by_kind(holders)
    lines = [f"out of memory on rank {rank}{_location(error, module)}; tensors that it holds:"]
    known = {} if predicted is None else {kind: getattr(predicted, kind) for kind in sums}
    for kind, size in sums.items():
        beside = f" ({format_bytes(known[kind])} predicted)" if known.get(kind) is not None else ""
        lines.append(f"  {kind.replace('_', ' ')} {format_bytes(size)}{beside}")
        largest = sorted((h for h in holders if h.kind == kind), key=lambda h: -h.nbytes)[:num_largest]
        lines += [f"    {holder.name} {format_bytes(holder.nbytes)}" for holder in largest]
    if predicted is not None and predicted.activations is not None:
        lines.append(f"  activations {format_bytes(predicted.activations)} predicted, of all microbatches in flight")
    if saved_by_layer:
        lines.append("  saved for the backward of one microbatch, without recomputation, by layer:")
        largest_layers = sorted(saved_by_layer.items(), key=lambda item: -item[1])[:num_largest]
        lines += [f"    {name} {format_bytes(size)}" for name, size in largest_layers]
    return "\n".join([*lines, _ADVICE])


def _location(error: BaseException, module: nn.Module) -> str:
    """The innermost module of the user whose code was running."""
    names = {id(child): name for name, child in module.named_modules()}
    found = ""
    for each in causes_of(error):
        for frame, line in _frames(each.__traceback__):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in names:
                name = names[id(owner)] or type(owner).__name__
                found = f", in {name} ({frame.f_code.co_filename}:{line})"
        if found:
            break
    return found


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next
