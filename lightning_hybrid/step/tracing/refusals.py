"""Refusals of steps without a loss, with ``backward()`` calls, or with ``torch.func`` transforms around operations.

The signature of an operation, by which two runs of a step are compared.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.errors import WITHOUT_STAGES, LossError, StepError
from lightning_hybrid.step.standins.marks import Marks
from lightning_hybrid.step.tracing.mode import LIGHTNING, user_line
from lightning_hybrid.step.tracing.recording import find_loss


def refuse_transforms(name: str) -> None:
    """Refuse a transform of ``torch.func`` around the operation ``name`` on values of the model."""
    if torch._C._are_functorch_transforms_active():
        raise StepError(
            f"{user_line()}: {name} runs inside a transform of torch.func (vmap, grad, jvp or one made of these),"
            " where values of the model cannot be followed from one operation to the next; apply the transform inside"
            " the forward of one layer, or use torch.autograd.grad",
            entry="torch-func",
        )


def no_loss_error(root: nn.Module, name: str, result: Any) -> StepError:
    """The error for a step that returned ``result`` instead of a loss; a ``LossError`` if it is no tensor at all."""
    what = "a tensor" if isinstance(result, Tensor) else f"a {type(result).__name__}"
    if isinstance(result, Mapping):
        what += f" with keys {list(result)}"
    is_certain = result is not None and not isinstance(find_loss(result), Tensor)
    kind = LossError if is_certain else StepError
    return kind(
        f"{name} returned {what} ({line_of_return(type(root), name)}) and no loss that depends on a trainable"
        " parameter; return the loss tensor, or a dict with the key 'loss'",
        entry="no-loss",
    )


def check_scalar(root: nn.Module, name: str, result: Any, given: str = "the batch") -> None:
    """Refuse a step whose result is, or has, a loss of several numbers, unless a ``backward`` of the user joins them.

    ``given`` is what the step was given.

    Raises:
        LossError: It has no gradient by itself.
    """
    loss = find_loss(result)
    if not isinstance(loss, Tensor) or loss.numel() == 1 or _has_own_backward(root):
        return
    raise LossError(
        f"{name} returned a loss of shape {list(loss.shape)} for {given} ({line_of_return(type(root), name)}); return"
        " one number, such as loss.mean()",
        entry="loss-shape",
    )


def _has_own_backward(root: nn.Module) -> bool:
    """Whether a class of the user has the method that Lightning calls with the loss."""
    method = getattr(type(root), "backward", None)
    return method is not None and method.__module__.split(".")[0] not in LIGHTNING


def line_of_return(kind: type, name: str) -> str:
    """``file:line`` where a step returns, or where it begins if it returns in several lines."""
    code = getattr(inspect.unwrap(getattr(kind, name)), "__code__", None)
    if code is None:
        return kind.__name__
    starts, line, found = dict(dis.findlinestarts(code)), code.co_firstlineno, set()
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset) or line
        if instruction.opname == "RETURN_VALUE":
            found.add(line)
    return f"{code.co_filename}:{found.pop() if len(found) == 1 else code.co_firstlineno}"


def check_backward_call(line: str, *, is_replayed: bool) -> None:
    """Refuse a step that calls ``backward()`` itself at ``line``, unless the recording is for inspection only."""
    if is_replayed:
        raise StepError(
            f"{line}: the step calls backward() itself, which would run on one stage instead of all; add the term to"
            f" the loss that the step returns, or {WITHOUT_STAGES}",
            entry="own-backward",
        )


_COMPARED_BY_VALUE = (bool, str, type(None), torch.dtype, torch.device)


def signature_of(
    name: str, leaves: Sequence[Any], marks: Marks, parameters: Mapping[int, str]
) -> tuple[Hashable, Hashable]:
    """The signature of an operation (name, described arguments), and its sizes (integers, shapes of batch tensors)."""
    signature: list[Hashable] = [name]
    sizes: list[Hashable] = []
    is_unit = name.startswith("@")
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            mark = marks.of(leaf)
            if mark is not None:
                signature.append(mark)
            elif id(leaf) in parameters:
                signature.append(parameters[id(leaf)])
            else:
                signature.append((leaf.dtype, leaf.dim(), leaf.requires_grad))
                sizes.append(tuple(leaf.shape))
        elif isinstance(leaf, _COMPARED_BY_VALUE):
            signature.append((type(leaf), leaf))
        else:
            signature.append("int" if isinstance(leaf, int) else type(leaf).__name__)
            if isinstance(leaf, int) and not is_unit:
                sizes.append(int.__index__(leaf))
    return tuple(signature), tuple(sizes)
