"""Trials of an optimizer's step on small copies of it: what it does with its parameters is tried, not known by name."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from lightning_hybrid.optim.trust_ratio import SHARD_METHODS, TrustRatioOptimizer
from lightning_hybrid.optimizers.replacement import ALL_OPTIMIZERS, HOOKS_OF_ALL, STEP_HOOKS, without_step_hooks
from lightning_hybrid.optimizers.state_file import state_tensors
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.objects.tensors import holds_tensors, inner_tensors
from lightning_hybrid.step.standins.tensors import full_shape, is_absent

# Attribute by which an optimizer class declares that its step of a parameter reads no other one.
INDEPENDENT = "steps_parameters_independently"


def why_not_layerwise(optimizer: Optimizer, *, in_file: bool) -> str:
    """The reason why an optimizer cannot step one layer at a time; empty if it can.

    A small copy of it is tried. In a file each layer's region is sized before states exist.
    """
    if not steps_independently(optimizer):
        return "uses several parameters at once in its step"
    if in_file and any(state_element_sizes(optimizer, group) is None for group in distinct_groups(optimizer)):
        return "keeps states of other shapes than its parameters"
    return ""


def steps_independently(optimizer: Optimizer, *, restores_options: bool = False) -> bool:
    """Whether stepping parameters one by one gives bitwise what stepping them together gives; tried on small ones.

    Small copies are tried, with the options of each kind of group. With ``restores_options`` each call finds the
    options of groups, such as a count of steps, as they were before the first one.
    """
    return all(_steps_group_independently(optimizer, group, restores_options) for group in distinct_groups(optimizer))


def _steps_group_independently(optimizer: Optimizer, group: int, restores_options: bool) -> bool:
    together, one_by_one = _small_twin(optimizer, group), _small_twin(optimizer, group)
    first, second = together.param_groups[0], one_by_one.param_groups[0]
    try:
        for round_ in range(2):
            for each in (first, second):
                for number, p in enumerate(each["params"]):
                    p.grad = torch.cos(p.detach() * (number + 2) + round_)
            _step(together)
            both, options = second["params"], dict(second)
            for p in both:
                if restores_options:
                    second.clear()
                    second.update(options)
                second["params"] = [p]
                _step(one_by_one)
            second["params"] = both
    except Exception:
        return False
    if not all(torch.equal(a, b) for a, b in zip(first["params"], second["params"], strict=True)):
        return False
    plain = [{k: v for k, v in each.items() if k != "params"} for each in (first, second)]
    return repr(plain[0]) == repr(plain[1])


def skips_missing_gradients(optimizer: Optimizer) -> bool:
    """Whether a step leaves a parameter without a gradient as it is, and makes no state for it; tried on small ones."""
    return all(_skips_in_group(optimizer, group) for group in distinct_groups(optimizer))


def _skips_in_group(optimizer: Optimizer, group: int) -> bool:
    twin = _small_twin(optimizer, group)
    first, second = twin.param_groups[0]["params"]
    before, states = second.detach().clone(), repr(twin.state.get(second))
    first.grad = torch.ones_like(first)
    try:
        _step(twin)
    except Exception:
        return False
    return torch.equal(second, before) and repr(twin.state.get(second)) == states


def state_element_sizes(optimizer: Optimizer, group: int = 0) -> list[int | None] | None:
    """Sizes of an optimizer's states for one parameter of a group, found by a step on a small one.

    Returns:
        Bytes per element of each state of more than one number; None for the dtype of the parameter. None in place of
        the list if some state has another shape than the parameter.
    """
    twin = _small_twin(optimizer, group)
    for p in twin.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    _step(twin)
    p = twin.param_groups[0]["params"][0]
    found: list[int | None] = []
    for value in state_tensors(twin.state.get(p)).values():
        if value.shape != p.shape:
            return None
        found.append(None if value.dtype == p.dtype else value.element_size())
    return found


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether the step of an optimizer is one of torch's, or of this package."""
    return type(optimizer).step.__module__.startswith(("torch.", "lightning_hybrid.optim."))


def state_shapes(
    optimizer: Optimizer, group: int, shape: Sequence[int], dtype: torch.dtype
) -> dict[str, tuple[int, ...]] | None:
    """Shapes of an optimizer's states for a parameter of a group, by name, found by a step on a small one.

    Returns None if that step fails.
    """
    sizes = _DISTINCT_SIZES[: len(shape)]
    if len(sizes) < len(shape) or (states := _states_by_name(optimizer, group, dtype, sizes)) is None:
        return None
    by_size = dict(zip(sizes, shape, strict=True))
    tensors = {name: value for name, value in states.items() if isinstance(value, Tensor)}
    return {name: tuple(by_size.get(size, size) for size in value.shape) for name, value in tensors.items()}


def _states_by_name(
    optimizer: Optimizer,
    group: int,
    dtype: torch.dtype,
    sizes: Sequence[int],
    *,
    runs_user_code: bool = True,
) -> dict[str, Any] | None:
    """The states of a parameter of these sizes after a step; None if the step fails."""
    p = nn.Parameter(torch.ones(sizes, dtype=dtype))
    p.grad = torch.ones_like(p)
    twin = _twin(optimizer, [p], group)
    try:
        (_step if runs_user_code else _step_of_library)(twin)
    except Exception:  # it needs a closure, several parameters, or another device
        return None
    return dict(twin.state.get(p, {}))


def has_low_bit_states(optimizer: Optimizer) -> bool:
    """Whether states of large parameters are quantized: in tensors of a class of their own, or of one byte each."""
    sizes = StateSizes(optimizer)
    return any(sizes.are_quantized(p) for group in optimizer.param_groups for p in group["params"])


def _step(twin: Any) -> None:
    """The step of a copy's class, without its replacements; what it compiles runs uncompiled."""
    _step_of(type(twin), twin)


def _step_of(kind: Any, twin: Any) -> None:
    step = kind.step
    # The compiler takes seconds to import, and minutes for the shapes of all trials.
    is_compiled = step.__module__.startswith(_COMPILED)
    eager = torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext()
    with eager, without_step_hooks(ALL_OPTIMIZERS, HOOKS_OF_ALL):
        step(twin)


def _step_of_library(twin: Any) -> None:
    """The step of the first class below a user's that a library has, as far as it does something."""
    for kind in type(twin).__mro__:
        if "step" in vars(kind) and kind is not Optimizer and kind.__module__.startswith(_PER_PARAMETER):
            return _step_of(kind, twin)
    raise NotImplementedError(f"{type(twin).__name__} is no library's")


_LABELS = ("params", "param_names", "name", "initial_lr")  # entries of groups that are no options of a step


def distinct_groups(optimizer: Optimizer) -> list[int]:
    """Numbers of the groups whose options may choose another step: others differ by the values of numbers alone."""
    kinds: dict[str, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        options = sorted((name, _kind(value)) for name, value in group.items() if name not in _LABELS)
        kinds.setdefault(repr(options), number)
    return list(kinds.values())


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "Tensor"
    if isinstance(value, tuple | list):
        return repr([_kind(each) for each in value])
    return f"number {value != 0}" if isinstance(value, int | float) and not isinstance(value, bool) else repr(value)


def _small_twin(optimizer: Optimizer, group: int = 0) -> Any:
    starts = [torch.rand(6, 8, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    return _twin(optimizer, [nn.Parameter(start) for start in starts], group)


def _twin(optimizer: Optimizer, parameters: list[nn.Parameter], group: int = 0) -> Any:
    """Copy an optimizer's class, and the options of one of its groups, for other parameters in one group."""
    twin: Any = copy_of_rank(optimizer)
    options = {name: copy.copy(value) for name, value in optimizer.param_groups[group].items() if name != "params"}
    if (lr := options.get("lr")) is not None:  # a warmup begins at 0, where all optimizers do the same: nothing
        options["lr"] = torch.full_like(lr, _LR) if isinstance(lr, Tensor) else _LR
    twin.__dict__.update(param_groups=[{**options, "params": parameters}], state=defaultdict(dict))
    if getattr(type(optimizer), INDEPENDENT, False):  # torch copies no attributes of a class of a third party
        plain = {name: value for name, value in vars(optimizer).items() if isinstance(value, bool | int | float | str)}
        twin.__dict__.update(plain | {name: None for name, value in vars(optimizer).items() if value is None})
    elif type(optimizer).step.__module__.startswith(_WITH_ATTRIBUTES):
        inherited = vars(Optimizer([nn.Parameter(torch.zeros(()))], {})).keys() | {"step"}
        own = {name: value for name, value in vars(optimizer).items() if name not in inherited}
        twin.__dict__.update((name, copy.copy(value)) for name, value in own.items())
    made = _states_before_first_step(optimizer)
    for p in parameters:
        twin.state[p].update((name, _state_like(value, p)) for name, value in made.items())
    for name in STEP_HOOKS:
        twin.__dict__[name] = OrderedDict()
    for name in SHARD_METHODS:  # its parameters are on this rank alone
        twin.__dict__.pop(name, None)
    return twin


def copy_of_rank(optimizer: Optimizer) -> Any:
    """Copy an optimizer with the states of this rank: in a run, ``copy.copy`` gathers the full ones."""
    kind = type(optimizer)
    copied = kind.__new__(kind)
    with _class_as_it_is(kind):
        copied.__setstate__(kind.__getstate__(optimizer))
    return copied


@contextlib.contextmanager
def _class_as_it_is(kind: Any) -> Iterator[None]:
    """Keep the step of a class: torch wraps it when one is copied, and wrappers without its ``__init__`` lack hooks."""
    own = vars(kind).get("step")
    yield
    if vars(kind).get("step") is not own:
        if own is None:
            del kind.step
        else:
            kind.step = own


def _states_before_first_step(optimizer: Optimizer) -> dict[str, Any]:
    """The states of some parameter before the first step: torch 2.11 makes Adagrad's when it is built."""
    if type(optimizer).step.__module__.startswith(
        _WITH_ATTRIBUTES
    ):  # they make none, and those of a step are quantized
        return {}
    for p, entry in optimizer.state.items():
        tensors = [value for value in entry.values() if isinstance(value, Tensor)]
        if tensors and all(not is_absent(value) and (not value.dim() or value.shape == p.shape) for value in tensors):
            return dict(entry)
    return {}


def _state_like(value: Any, p: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return copy.copy(value)
    return torch.full_like(p, value.flatten()[0].item()) if value.dim() else value.detach().to("cpu", copy=True)


def can_step_shards(optimizer: Optimizer) -> bool:
    """Whether an optimizer steps shards of a parameter as it steps the full one; tried on a small and a larger one.

    States of the larger one are quantized by the optimizers that do so, in blocks that the shards do not respect. A
    class that is not known may choose its step by a parameter's shape, and is tried on those of its own.
    """
    shapes: set[tuple[int, ...]] = {_SMALL, _IN_BLOCKS}
    if getattr(type(optimizer), INDEPENDENT, False):
        full = (full_shape(p) for group in optimizer.param_groups for p in group["params"])
        shapes |= {tuple(min(size, _LONGEST) for size in shape) for shape in full if math.prod(shape) > 1}
    groups = distinct_groups(optimizer)
    return all(_steps_shards_of(optimizer, group, shape) for shape in sorted(shapes, key=math.prod) for group in groups)


def _steps_shards_of(optimizer: Optimizer, group: int, shape: tuple[int, ...]) -> bool:
    generator = torch.Generator().manual_seed(0)
    full_tensor = torch.rand(shape, dtype=torch.float64, generator=generator) + 0.1
    gradients = [torch.rand(shape, dtype=torch.float64, generator=generator) - 0.4 for _ in range(2)]
    try:
        expected = _stepped(optimizer, group, [full_tensor], [[gradient] for gradient in gradients])[0]
        for dim, num_shards in itertools.product(range(len(shape)), (2, _MANY)):
            parts = [part.contiguous() for part in full_tensor.chunk(num_shards, dim)]
            given = [[part.contiguous() for part in gradient.chunk(num_shards, dim)] for gradient in gradients]
            if not torch.allclose(
                torch.cat(_stepped(optimizer, group, parts, given), dim), expected, rtol=1e-9, atol=1e-12
            ):
                return False
    except Exception:
        return False
    return True


def _stepped(optimizer: Optimizer, group: int, starts: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
    parameters = [nn.Parameter(start.clone()) for start in starts]
    twin = _twin(optimizer, parameters, group)
    for given in gradients:
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient.clone()
        _step(twin)
    return [parameter.detach() for parameter in parameters]


# Their steps look at one parameter at a time; following them would only cost time.
_PER_PARAMETER = ("torch.", "torchao.", "transformers.", "bitsandbytes.", "lightning_hybrid.optim.")
_COMPILED = ("torchao.",)  # compile their steps
_WITH_ATTRIBUTES = ("torchao.", "bitsandbytes.")  # have options beside those of their groups


def combines_parameters(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step, or a hook on it, may combine several parameters."""
    if isinstance(optimizer, LBFGS):
        return True
    hooks = [getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")]
    is_declared = bool(getattr(type(optimizer), INDEPENDENT, False))
    return any(hooks) or not (is_declared or type(optimizer).step.__module__.startswith(_PER_PARAMETER))


def steps_full_parameters(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step needs all elements of a parameter, and nothing of others; tried on small ones."""
    if combines_parameters(optimizer) or isinstance(optimizer, SparseAdam | TrustRatioOptimizer):
        return False
    return not can_step_shards(optimizer) and steps_independently(optimizer, restores_options=True)


class StateSizes:
    """Sizes of an optimizer's states, found by steps on small parameters of each kind; no class is known by name."""

    def __init__(
        self, optimizer: Optimizer, *, in_float32: bool = False, copies: bool = False, runs_user_code: bool = True
    ) -> None:
        """Prepare.

        ``copies`` in float32 are kept, and count as states. Where no code of the user may run, the step of the
        library's class below is tried, and sizes are unknown where there is none.
        """
        self._runs_user_code = runs_user_code
        self._optimizer, self._in_float32 = optimizer, in_float32
        self._copy_bytes = 4 if copies else 0
        self._groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._tried: dict[Any, list[tuple[list[int], int, int]] | None] = {}
        self._quantized: dict[Any, bool] = {}

    def steps(self, parameter: Tensor) -> bool:
        """Whether the optimizer steps this parameter, of any shape."""
        return id(parameter) in self._groups

    def nbytes(self, parameter: Tensor, shape: Sequence[int]) -> int | None:
        """The bytes of the states of a parameter after its first step; None if a step on a small one fails.

        Those that are quantized belong to one owner of a sharded parameter; of these, its share of the elements counts.
        ``shape`` is of the shard that is stepped.
        """
        widens = self._in_float32 and parameter.dtype is torch.bfloat16
        copies = self._copy_bytes * math.prod(shape) if widens else 0
        if self.are_quantized(parameter):
            full = max(1, math.prod(full_shape(parameter)))
            return copies + self._bytes_in_blocks(parameter, full) * math.prod(shape) // full
        key = self._groups[id(parameter)], len(shape), torch.float32 if widens else parameter.dtype
        if key not in self._tried:
            self._tried[key] = self._try(*key)
        tried = self._tried[key]
        if tried is None:
            return None
        return copies + sum(math.prod(shape[dim] for dim in dims) * other * itemsize for dims, other, itemsize in tried)

    def are_quantized(self, parameter: Tensor) -> bool:
        """Whether the states of a parameter of this dtype and group are quantized if it is large; it has any shape."""
        key = self._groups[id(parameter)], parameter.dtype
        if key not in self._quantized:
            states = self._states_of(*key, _IN_BLOCKS) or []
            is_one_byte = [state.element_size() == 1 and state.numel() > 1 for state in states]
            self._quantized[key] = any(is_one_byte) or any(map(holds_tensors, states))
        return self._quantized[key]

    def _bytes_in_blocks(self, parameter: Tensor, numel: int) -> int:
        """Bytes of quantized states, which grow by the same number with each _PERIOD of elements.

        Below twice that number, states of the very size are made.
        """
        key = self._groups[id(parameter)], parameter.dtype
        first = numel if numel < 2 * _PERIOD else numel % _PERIOD + _PERIOD
        periods = (numel - first) // _PERIOD
        sizes = [self._states_of(*key, (count,)) or [] for count in (first, first + _PERIOD)[: 2 if periods else 1]]
        nbytes = [sum(inner.nbytes for state in states for inner in inner_tensors(state)) for states in sizes]
        return nbytes[0] + periods * (nbytes[-1] - nbytes[0])

    def _states_of(self, group: int, dtype: torch.dtype, sizes: Sequence[int]) -> list[Tensor] | None:
        """The state tensors of a parameter of these sizes after a step; None if the step fails."""
        if not (dtype.is_floating_point or dtype.is_complex):
            return []  # it never has a gradient
        states = _states_by_name(self._optimizer, group, dtype, sizes, runs_user_code=self._runs_user_code)
        return None if states is None else [value for value in flatten(states)[0] if isinstance(value, Tensor)]

    def _try(self, group: int, ndim: int, dtype: torch.dtype) -> list[tuple[list[int], int, int]] | None:
        """For each state tensor, the dims of the parameter that it has, its other elements, and their size."""
        sizes = _DISTINCT_SIZES[:ndim]
        states = self._states_of(group, dtype, sizes)
        if states is None:
            return None
        found = []
        for state in states:
            dims = [sizes.index(size) for size in state.shape if size in sizes]
            others = math.prod(size for size in state.shape if size not in sizes)
            found.append((dims, others, state.element_size()))
        return found


_DISTINCT_SIZES = (5, 7, 3, 2, 11, 13)
_SMALL, _IN_BLOCKS = (4, 6), (64, 128)  # blocks of quantized states have up to some 2,048 elements, tensors 4,096
_LONGEST = 512  # longer dims of a parameter are tried at this length
_MANY = 16  # shards, beside two
_PERIOD = 2**15
_LR = 0.1
