"""Counts of a recorded step: FLOPs, bytes, random draws, and tensors saved for the backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry

from lightning_hybrid.soft_failures import note_failure
from lightning_hybrid.step.objects.pytree import flatten, map_leaves
from lightning_hybrid.step.objects.tensors import as_plain_tensor, storage_id
from lightning_hybrid.step.standins.kernels import NO_FAKE_KERNEL, run_kernel_on_stand_ins
from lightning_hybrid.step.standins.tensors import limit_kernel_cache


class PackedByOuterHooks(NamedTuple):
    """A saved tensor in the form that hooks around others have given it, since torch calls the innermost ones alone."""

    packed: Any  # what they have made of it
    unpack: Callable[[Any], Tensor]  # their function that undoes it

    def restore(self) -> Tensor:
        """The tensor, of the shape it was saved with."""
        return self.unpack(self.packed)


class SavedTensors(NamedTuple):
    """The tensors that one operation saves."""

    inner_bytes: int = 0  # bytes of those that are neither inputs nor outputs, nor parameters or buffers
    inputs: tuple[int, ...] = ()  # positions of the inputs whose memory it saves
    outputs: tuple[int, ...] = ()  # positions of the outputs whose memory it saves


class SavedForBackward:
    """Finds what each operation saves; hooks on saved tensors would forbid ``torch.func`` inside."""

    def __init__(self, root: nn.Module) -> None:
        """Take a module whose parameters and buffers do not count."""
        self._members = {storage_id(tensor) for tensor in (*root.parameters(), *root.buffers())}
        self._visited: dict[int, Any] = {}  # autograd's nodes by id, which are alive as long as they are here
        self._names: dict[type, list[str]] = {}

    def by_operation(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> SavedTensors:
        """Find what the operation that has just run saves, by leaves of its arguments and result, of any shapes.

        Call it for each operation, in order.
        """
        sizes = self.sizes_behind([*inputs, *outputs])
        given, made = _positions(inputs, sizes), _positions(outputs, sizes)
        inner = sum(size for storage, size in sizes.items() if storage not in given and storage not in made)
        return SavedTensors(inner, tuple(given.values()), tuple(made.values()))

    def sizes_behind(self, leaves: Sequence[Any]) -> dict[int, int]:
        """Bytes that operations behind these leaves save, by storage; without operations of earlier calls."""
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
    """Bytes that a step has saved for the backward of its loss, without parameters and buffers of ``root``.

    Nor do the ``excluded`` tensors count, of any shapes, such as those of the batch.
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


class Totals(NamedTuple):
    """What a counter has counted so far, or one operation."""

    flops: float = 0.0  # of the forward
    step_flops: float = 0.0  # of the forward, and of the backward without what it runs again
    moved_bytes: float = 0.0  # written
    repeated_flops: float = 0.0  # of the forward that checkpoints of the user's code run again in the backward

    def since(self, earlier: Totals) -> Totals:
        """Return what was counted after ``earlier``."""
        return Totals(*(now - before for now, before in zip(self, earlier, strict=True)))

    def plus(self, other: Totals) -> Totals:
        """Return what was counted here and there."""
        return Totals(*(one + more for one, more in zip(self, other, strict=True)))


class CostCounter(TorchDispatchMode):
    """Counts the cost of every kernel of a recording, inside units too.

    Attributes:
        flops: Floating-point operations so far (torch's own formulas for matrix products, convolutions, attention), of
            causal attention those that its kernel does not skip.
        step_flops: Those of a training step so far, all by torch's formulas: of the kernels, and of what differentiates
            them.
        moved_bytes: Bytes written so far.
        repeated_flops: Those of the forward that checkpoints of the user's code run again in the backward, so far.
        num_repeats: The number of checkpoints of the user's code that are running.
        drawing: FQNs of the modules whose own code ran a random kernel, in order.
        has_dynamic_shapes: Whether a kernel ran whose result has a shape that depends on values.
        captured_reads: The number of captured inputs that kernels have read.
        saved: What the latest operation or unit saves for its backward.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        limit_kernel_cache()
        self.flops = self.step_flops = self.repeated_flops = 0.0
        self.moved_bytes = 0.0
        self.num_repeats = 0
        self.drawing: dict[str, None] = {}
        self.has_dynamic_shapes = False
        self._on_kernel_arguments: Callable[[Any], int] | None = None
        self.captured_reads = 0
        self.saved = SavedTensors()
        self._saved_for_backward = SavedForBackward(root)
        self._names = {id(module): name for name, module in root.named_modules()}
        self._stack = [""]
        self._kernel_traits: dict[Any, tuple[bool, bool]] = {}

    @contextlib.contextmanager
    def repeating(self) -> Iterator[None]:
        """Count what runs inside as run again in the backward."""
        self.num_repeats += 1
        try:
            yield
        finally:
            self.num_repeats -= 1

    @contextlib.contextmanager
    def shapes_apart(self) -> Iterator[None]:
        """Observe inside, alone, whether shapes depend on values."""
        before, self.has_dynamic_shapes = self.has_dynamic_shapes, False
        try:
            yield
        finally:
            self.has_dynamic_shapes = before

    def forget_shapes(self) -> None:
        """Observe from now on whether shapes depend on values."""
        self.has_dynamic_shapes = False

    @contextlib.contextmanager
    def counting(self, captured: Callable[[Any], int]) -> Iterator[None]:
        """Call a function with the arguments of each kernel inside, which returns how many are captured inputs."""
        self._on_kernel_arguments = captured
        try:
            yield
        finally:
            self._on_kernel_arguments = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one kernel."""
        if func is _DEVICE and len(args) == 1 and type(args[0]) is FakeTensor and not _is_in_kernel(args[0]):
            return args[0].fake_device  # two thirds of all calls; a stand-in would return the same more slowly
        kwargs = kwargs or {}
        if self._on_kernel_arguments is not None:
            self.captured_reads += self._on_kernel_arguments(args)
        try:
            out = func(*args, **kwargs)
        except TypeError:  # fake kernels do not support the user's tensor subclasses
            plain_args, plain_kwargs = map_leaves(as_plain_tensor, (args, kwargs))
            out = func(*plain_args, **plain_kwargs)
        except NO_FAKE_KERNEL as error:
            out = run_kernel_on_stand_ins(func, args, kwargs, error)
            self.has_dynamic_shapes |= isinstance(error, DynamicOutputShapeException)
        kind = self._kernel_traits.get(func)
        if kind is None:
            may_draw = torch.Tag.nondeterministic_seeded in func.tags
            kind = self._kernel_traits[func] = may_draw, func.is_view
        may_draw, is_view = kind
        if may_draw and _draws(func, args, kwargs):
            self.drawing[self._stack[-1]] = None
        forward, backward = flops_of_kernel(func, args, kwargs, out)
        computed = forward * _computed_share(func, args, kwargs) if forward else 0.0
        self.flops += computed
        self.repeated_flops += computed * self.num_repeats
        self.step_flops += forward + backward
        if not is_view:
            for made in out if isinstance(out, tuple | list) else (out,):
                if isinstance(made, Tensor):
                    self.moved_bytes += made.numel() * made.element_size()
        return out

    def totals(self) -> Totals:
        """Return what was counted so far."""
        return Totals(self.flops, self.step_flops, self.moved_bytes, self.repeated_flops)

    def reset_to(self, totals: Totals) -> None:
        """Count as if nothing had run since `totals` returned these, such as what failed and runs again."""
        self.flops, self.step_flops, self.moved_bytes, self.repeated_flops = totals

    def count_saved(self, inputs: Sequence[Any], out: Any) -> None:
        """Find what an operation saves, whose arguments have the leaves ``inputs``, and whose result is ``out``."""
        try:
            self.saved = self._saved_for_backward.by_operation(inputs, flatten(out)[0])
        except RuntimeError:  # tensors inside of a function transform have no storage
            self.saved = SavedTensors()

    @contextlib.contextmanager
    def module_stack(self) -> Iterator[None]:
        """Track the module in which a kernel runs."""

        def enter(module: nn.Module, _: Any) -> None:
            self._stack.append(self._names.get(id(module), self._stack[-1]))

        def leave(*_: Any) -> None:
            self._stack.pop()

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def active_counter() -> CostCounter | None:
    """Return the counter of the recording that runs now; None if there is none."""
    modes = reversed(_get_current_dispatch_mode_stack())
    return next((mode for mode in modes if isinstance(mode, CostCounter)), None)


_DEVICE = torch.ops.prim.device.default
_ATEN = torch.ops.aten
# Positions of the matrices in a product; the derivative by each of them costs as much as the product.
_PRODUCTS = {
    _ATEN.mm: (0, 1),
    _ATEN.bmm: (0, 1),
    _ATEN.addmm: (1, 2),
    _ATEN.baddbmm: (1, 2),
    _ATEN._scaled_mm: (0, 1),
    _ATEN.convolution: (0, 1),
    _ATEN._convolution: (0, 1),
}
# Attention is two products, and its backward five: three by the operands, one by the probabilities, one recomputed.
_ATTENTION_BACKWARD = 2.5
_CPU_ATTENTION = _ATEN._scaled_dot_product_flash_attention_for_cpu  # torch has no formula for it
# Kernels of queries [..., queries, width] and keys [..., keys, width].
_ATTENTION = {
    _CPU_ATTENTION,
    _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_efficient_attention,
    _ATEN._scaled_dot_product_cudnn_attention,
}
# Kernels of recurrent layers, for which torch has no formula: all positions of a layer, or of several.
_RECURRENT = {_ATEN.mkldnn_rnn_layer, _ATEN._cudnn_rnn}


def flops_of_kernel(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[float, float]:
    """Return the floating-point operations of a kernel, and of the backward that differentiates it.

    The forward is counted by torch's formulas, the backward from the operands that require a gradient. So a step can be
    counted from its forward alone, and what is recomputed in its backward does not count.
    """
    try:
        return _flops_of_kernel(func, args, kwargs, out)
    except Exception as error:  # a formula that torch, or the user, has registered for other arguments
        note_failure(f"the number of FLOPs of {func}", error)
        return 0.0, 0.0


def _flops_of_kernel(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[float, float]:
    kernel = func._overloadpacket
    if kernel in _RECURRENT:
        return _flops_of_recurrent_layer(args)
    count = flop_registry.get(_ATEN._scaled_dot_product_flash_attention if kernel is _CPU_ATTENTION else kernel)
    if count is None:
        return 0.0, 0.0
    forward = float(count(*args[:3], out_val=out) if kernel is _CPU_ATTENTION else count(*args, **kwargs, out_val=out))
    if not torch.is_grad_enabled():
        return forward, 0.0
    if kernel in _PRODUCTS:
        differentiated = [args[position] for position in _PRODUCTS[kernel] if position < len(args)]
        return forward, forward * sum(_takes_gradient(each) for each in differentiated)
    return forward, forward * _ATTENTION_BACKWARD * any(_takes_gradient(each) for each in args[:3])


def _flops_of_recurrent_layer(args: Any) -> tuple[float, float]:
    """FLOPs of the products of a recurrent layer, LSTM or GRU, and of their backward: each weight at each position.

    The arguments begin with the input, [..., features] of any number of positions, and the weights as tensors or in a
    list, the one of the input first.
    """
    source, weights = args[0], flatten(list(args[1:5]) if isinstance(args[1], Tensor) else args[1])[0]
    matrices = [weight for weight in weights if weight.dim() == 2]
    positions = source.numel() / max(1, source.shape[-1])
    forward = 2.0 * positions * sum(weight.numel() for weight in matrices)
    if not torch.is_grad_enabled() or not any(map(_takes_gradient, (source, *weights))):
        return forward, 0.0
    of_operands = forward if _takes_gradient(source) else forward - 2.0 * positions * matrices[0].numel()
    return forward, of_operands + forward * any(map(_takes_gradient, matrices))


def _computed_share(func: Any, args: Any, kwargs: Any) -> float:
    """The share of the scores that a kernel of attention computes: all that a causal mask does not hide."""
    if func._overloadpacket not in _ATTENTION or not _argument(func, args, kwargs, "is_causal"):
        return 1.0
    queries, keys = args[0].shape[-2], args[1].shape[-2]
    seen = min(queries, keys)  # query i sees keys 0 to i
    return (seen * (seen + 1) / 2 + (queries - seen) * keys) / max(1, queries * keys)


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    [position] = [i for i, argument in enumerate(func._schema.arguments) if argument.name == name]
    return args[position] if position < len(args) else kwargs.get(name, False)


def _takes_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _is_in_kernel(tensor: FakeTensor) -> bool:
    """Whether a fake kernel runs, for which its arguments are tensors on the meta device."""
    return bool(tensor.fake_mode.in_kernel_invocation)


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call of a random kernel draws: attention without dropout, or dropout in eval mode, does not."""
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        if argument.name in ("dropout_p", "dropout", "p") and value == 0:
            return False
        if argument.name in ("train", "training") and value is False:
            return False
    return True
