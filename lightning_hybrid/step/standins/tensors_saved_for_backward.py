"""Tensors that the operations of a recorded step save for the backward, read from autograd's graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_hybrid.step.objects.tensor_storage_and_subclasses import storage_id


class PackedByOuterHooks(NamedTuple):
    """A saved tensor in the form that hooks around others have given it, since torch calls the innermost ones alone.

    Attributes:
        packed: What they have made of it.
        unpack: Their function that undoes it.
    """

    packed: Any
    unpack: Callable[[Any], Tensor]

    def restore(self) -> Tensor:
        """The tensor, of the shape it was saved with."""
        return self.unpack(self.packed)


class SavedTensors(NamedTuple):
    """The tensors that one operation saves.

    Attributes:
        inner_bytes: Bytes of those that are neither inputs nor outputs, nor parameters or buffers.
        inputs: Positions of the inputs whose memory it saves.
        outputs: Positions of the outputs whose memory it saves.
    """

    inner_bytes: int = 0
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


class SavedForBackward:
    """Finds what each operation saves; hooks on saved tensors would forbid ``torch.func`` inside."""

    def __init__(self, root: nn.Module) -> None:
        """Take a module whose parameters and buffers do not count."""
        self._members = {storage_id(tensor) for tensor in (*root.parameters(), *root.buffers())}
        self._visited: dict[int, Any] = {}  # autograd's nodes by id, which are alive as long as they are here
        self._names: dict[type, list[str]] = {}

    def by_operation(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> SavedTensors:
        """Find what the operation saves that has just run on ``inputs``; call it for each operation, in order.

        Args:
            inputs: Leaves of its arguments, of which some are tensors of any shape.
            outputs: Leaves of its result.
        """
        sizes = self.sizes_behind([*inputs, *outputs])
        given, made = _positions(inputs, sizes), _positions(outputs, sizes)
        inner = sum(size for storage, size in sizes.items() if storage not in given and storage not in made)
        return SavedTensors(inner, tuple(given.values()), tuple(made.values()))

    def sizes_behind(self, leaves: Sequence[Any]) -> dict[int, int]:
        """Bytes that the operations behind these leaves save, by storage; of those that no earlier call has reached."""
        sizes: dict[int, int] = {}
        for node in self._new_nodes(leaves):
            for tensor in self._saved_by(node):
                strided = tensor.layout is torch.strided
                nbytes = tensor.untyped_storage().nbytes() if strided else tensor.numel() * tensor.element_size()
                sizes[storage_id(tensor)] = nbytes
        for member in self._members & sizes.keys():
            del sizes[member]
        return sizes

    def _new_nodes(self, leaves: Sequence[Any]) -> Iterator[Any]:
        """Autograd's nodes behind these leaves that no earlier call has yielded."""
        open_nodes = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)]
        while open_nodes:
            node = open_nodes.pop()
            if node is not None and id(node) not in self._visited:
                self._visited[id(node)] = node
                yield node
                open_nodes += [following for following, _ in node.next_functions]

    def _saved_by(self, node: Any) -> Iterator[Tensor]:
        if type(node) not in self._names:
            names = [name for name in dir(node) if name.startswith("_saved_")]
            self._names[type(node)] = names or ["saved_tensors"]
        for name in self._names[type(node)]:
            try:
                packed = list(self._packed(getattr(node, f"_raw_{name.lstrip('_')}", None)))
                saved = packed or getattr(node, name, None)
            except RuntimeError:  # written in place since, or freed by a backward of the step
                continue
            for value in saved if isinstance(saved, tuple | list) else (saved,):
                if isinstance(value, Tensor):
                    yield value

    def _packed(self, raw: Any) -> Iterator[Any]:
        """What hooks on saved tensors have left of them, if there are any: unpacking it would run the user's function.

        Those of ``torch.utils.checkpoint`` leave the arguments of the function, which is run again in the backward.
        """
        for variable in raw if isinstance(raw, tuple | list) else (raw,):
            hook = getattr(variable, "unpack_hook", None)
            if hook is None:
                continue
            packed = variable.data
            while isinstance(packed, PackedByOuterHooks):
                packed, hook = packed
            yield packed
            for cell in getattr(hook, "__closure__", None) or ():
                if isinstance(cell.cell_contents, torch.utils.checkpoint._CheckpointFrame):
                    yield from self._arguments_of(cell.cell_contents)

    def _arguments_of(self, frame: Any) -> Iterator[Any]:
        saver = getattr(frame, "input_saver", None)  # of torch before 2.13
        raw = frame.saved_args if saver is None else saver.grad_fn._raw_saved_tensors
        packed = list(self._packed(raw))
        if packed:  # inside another checkpoint, say
            yield from packed
        else:
            yield from frame.get_inputs() if saver is None else saver.grad_fn.saved_tensors


def bytes_saved_behind(loss: Tensor, root: nn.Module, excluded: Sequence[Tensor]) -> int:
    """Bytes that a step has saved for the backward of its loss, without parameters and buffers.

    Args:
        loss: Of any shape, with its graph.
        root: Its parameters and buffers do not count.
        excluded: Tensors of any shapes that do not count either, such as those of the batch.
    """
    sizes = SavedForBackward(root).sizes_behind([loss])
    storages = {storage_id(tensor) for tensor in excluded}
    return sum(size for storage, size in sizes.items() if storage not in storages)


def _positions(leaves: Sequence[Any], storages: dict[int, int]) -> dict[int, int]:
    """The position of the first leaf with each of these storages."""
    found: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and (storage := storage_id(leaf)) in storages:
            found.setdefault(storage, position)
    return found
