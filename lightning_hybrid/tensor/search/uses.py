"""The calls of the units that a step makes, with their arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.step.objects.modules import copied
from lightning_hybrid.step.objects.names import CASTS, names, operator_names
from lightning_hybrid.step.objects.pytree import flatten, flatten_call, unflatten
from lightning_hybrid.step.recording.layers import without_deduplication
from lightning_hybrid.step.standins.tensors import SHAPE_PROPERTIES
from lightning_hybrid.step.tracing.mode import _METADATA, VIEW_PROPERTIES, user_line
from lightning_hybrid.tensor.region import tensors_in

_PLAIN = (bool, int, float, str, type(None))
# Properties of a parameter that differ where a rank has a shard of it; its dtype, for example, does not.
_SHAPE_OR_VIEW_PROPERTIES = VIEW_PROPERTIES | SHAPE_PROPERTIES


@dataclass
class UnitCalls:
    """The calls of the tensor units in a recorded step, and reads of their parameters outside of them."""

    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)  # of one call each
    read_outside: dict[str, set[str]] = field(default_factory=dict)  # unit -> parameters that other code reads
    running: list[str] = field(default_factory=list)  # FQNs of the units that are running


@contextlib.contextmanager
def record_calls(units: Mapping[str, nn.Module], pipeline_units: Mapping[str, nn.Module]) -> Iterator[UnitCalls]:
    """Records the calls of units, and reads in modules that run as one operation, while a step is recorded inside."""
    calls = UnitCalls()
    running = calls.running

    def wrap(fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            calls.arguments[fqn] = _copied_call(args, kwargs)
            running.append(fqn)
            try:
                return forward(*args, **kwargs)
            finally:
                running.pop()

        return recorded

    def wrap_pipeline_unit(fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            owners = {
                id(parameter): (inner, name)
                for inner, unit in units.items()
                if inner == fqn or inner.startswith(fqn + ".")
                for name, parameter in unit.named_parameters()
            }
            with _OutsideReads(owners, calls):
                return forward(*args, **kwargs)

        return recorded

    with (
        without_deduplication(units),
        replaced_forwards(units, wrap, reason="records calls of units"),
        replaced_forwards(pipeline_units, wrap_pipeline_unit, reason="records calls of units"),
    ):
        yield calls


class _OutsideReads(TorchFunctionMode):
    """A function mode that records parameters which are read while their unit does not run."""

    def __init__(self, owners: Mapping[int, tuple[str, str]], calls: UnitCalls) -> None:
        super().__init__()
        self._owners, self._calls = owners, calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_property = getattr(func, "__name__", "") == "__get__"
        if not is_property or func.__self__.__name__ in _SHAPE_OR_VIEW_PROPERTIES:
            for leaf in flatten_call(args, kwargs)[0]:
                if id(leaf) in self._owners:
                    unit, name = self._owners[id(leaf)]
                    if unit not in self._calls.running:
                        self._calls.read_outside.setdefault(unit, set()).add(name)
        return func(*args, **kwargs)


def _copied_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies the arguments as they are now: a unit may change the objects that it receives."""
    leaves, spec = flatten((args, kwargs))
    copies = [leaf if isinstance(leaf, (Tensor, *_PLAIN)) else copied(leaf) for leaf in leaves]
    return unflatten(copies, spec)


_VIEW_PROPERTIES = frozenset({"T", "mT"})
_TRANSPOSES = frozenset({"t", "transpose", "swapaxes", "get_T", "get_mT"})
_CASTS = CASTS | {"type", "type_as"}
_PRODUCTS = frozenset({"matmul", "__matmul__", "mm"})
# Operations on logits whose results are logits, a slice of their positions or their log-probabilities.
_LOGITS_OPS = (
    _CASTS
    | operator_names(("mul", "div", "truediv", "add", "sub", "neg"))
    | names(
        "view reshape flatten unflatten permute movedim squeeze unsqueeze __getitem__ narrow transpose select split"
        " chunk unbind index_select cat view_as reshape_as tanh where masked_fill log_softmax softmax"
    )
)
_LOSSES = frozenset({"cross_entropy", "nll_loss", "logsumexp", "gather", "log_softmax"})
_OTHER_READERS = frozenset({"argmax"})


@dataclass
class WeightUse:
    """The uses of one weight in a step."""

    dims: set[int] = field(default_factory=set)  # the dims along which it is used as a vocabulary
    is_table: bool = False  # whether it is looked up
    is_head: bool = False  # whether something is multiplied by it
    reads_loss: bool = False  # whether a loss reads the product, as logits
    reads_others: str = ""  # description of another reader of the product; empty if none
    biases: set[str] = field(default_factory=set)  # parameters that are added to the product
    outside: bool = False  # whether code outside of its unit uses it
    other: str = ""  # description of another use of the weight; empty if none


class VocabularyUses(TorchFunctionMode):
    """A function mode that records the uses of the weights of a module.

    Attributes:
        uses: The uses, by the first FQN of the weight in the root.
    """

    def __init__(self, root: nn.Module, units: Mapping[str, nn.Module], running: list[str]) -> None:
        super().__init__()
        self._root, self._running = root, running
        names = {id(parameter): name for name, parameter in root.named_parameters()}
        self._units: dict[str, set[str]] = {}
        for fqn, unit in units.items():
            for parameter in unit.parameters():
                self._units.setdefault(names[id(parameter)], set()).add(fqn)
        self._names: dict[int, str] = {}
        self._stand_ins: list[Tensor] = []  # referenced, so that their ids stay unique
        self.uses: dict[str, WeightUse] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the function, and records its use of weights and logits."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = "get_" + func.__self__.__name__
            if func.__self__.__name__ not in _VIEW_PROPERTIES:
                return out
        elif name in _METADATA or name == "__set__":
            return out
        leaves = list(tensors_in(flatten_call(args, kwargs)[0]))
        weights = [(leaf, self._weight_of(leaf)) for leaf in leaves]
        if any(weight is not None for _, weight in weights):
            self._record_weights_used(name, func, args, kwargs, out)
        logits = frozenset[str]().union(*(getattr(leaf, _LOGITS, ()) for leaf in leaves))
        if logits:
            self._record_logits_read(name, logits, leaves, out)
        return out

    def _weight_of(self, tensor: Any) -> tuple[str, bool] | None:
        """FQN of the parameter that a tensor is or comes from by casts and transposes, and whether it is transposed."""
        if not isinstance(tensor, Tensor):
            return None
        marked: tuple[str, bool] | None = getattr(tensor, _WEIGHT, None)
        if marked is not None:
            return marked
        if not isinstance(tensor, nn.Parameter):
            return None
        if id(tensor) not in self._names:  # a recording has stand-ins of its own
            for name, parameter in self._root.named_parameters():
                self._names[id(parameter)] = name
                self._stand_ins.append(parameter)
        found = self._names.get(id(tensor))
        return None if found is None else (found, False)

    def _use_of(self, name: str) -> WeightUse:
        use = self.uses.setdefault(name, WeightUse())
        use.outside |= not any(unit in self._running for unit in self._units.get(name, ()))
        return use

    def _record_weights_used(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        handled: set[str] = set()
        first = self._weight_of(args[0]) if args else None
        if func is F.embedding:
            weight = self._weight_of(args[1] if len(args) > 1 else kwargs.get("weight"))
            if weight is not None and not weight[1]:
                use = self._use_of(weight[0])
                use.is_table, use.dims = True, use.dims | {0}
                options = {key: value for key, value in kwargs.items() if key not in ("input", "weight")}
                use.other = use.other or _lookup_options(*args[2:], **options)
                handled.add(weight[0])
        elif name == "linear":
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            handled |= self._record_product(self._weight_of(args[1]) if len(args) > 1 else None, 0, args[0], bias, out)
        elif name in _PRODUCTS and len(args) == 2:
            handled |= self._record_product(self._weight_of(args[1]), 1, args[0], None, out)
        elif name == "addmm" and len(args) == 3:
            handled |= self._record_product(self._weight_of(args[2]), 1, args[1], args[0], out)
        elif first is not None and name in _TRANSPOSES | _CASTS and isinstance(out, Tensor):
            setattr(out, _WEIGHT, (first[0], first[1] ^ (name in _TRANSPOSES)))
            handled.add(first[0])
        elif name in _LOGITS_OPS and any(hasattr(leaf, _LOGITS) for leaf in tensors_in(args)):
            for leaf in tensors_in(args):
                weight = self._weight_of(leaf)
                if weight is not None and isinstance(out, Tensor) and leaf.dim() == 1 and len(leaf) == out.shape[-1]:
                    self._add_bias(next(other for other in tensors_in(args) if hasattr(other, _LOGITS)), weight[0])
                    handled.add(weight[0])
        for leaf in tensors_in(flatten_call(args, kwargs)[0]):
            weight = self._weight_of(leaf)
            if weight is not None and weight[0] not in handled:
                use = self._use_of(weight[0])
                use.other = use.other or f"read by {name} at {user_line()}"

    def _record_product(self, weight: tuple[str, bool] | None, dim: int, x: Any, bias: Any, out: Any) -> set[str]:
        if weight is None or self._weight_of(x) is not None or not isinstance(out, Tensor):
            return set()
        name, transposed = weight
        use = self._use_of(name)
        use.is_head, use.dims = True, use.dims | {dim ^ transposed}
        setattr(out, _LOGITS, frozenset({name}))
        added = self._weight_of(bias)
        if added is None:
            return {name}
        self._add_bias(out, added[0])
        return {name, added[0]}

    def _add_bias(self, logits: Tensor, bias: str) -> None:
        self._use_of(bias)
        for name in getattr(logits, _LOGITS):
            self.uses[name].biases.add(bias)

    def _record_logits_read(self, name: str, logits: frozenset[str], leaves: list[Tensor], out: Any) -> None:
        for use in (self.uses[weight] for weight in logits):
            if name in _LOSSES:
                use.reads_loss = True
            elif name not in _LOGITS_OPS | _OTHER_READERS:
                use.reads_others = use.reads_others or f"{name} at {user_line()}"
        if name in _LOGITS_OPS:
            for tensor in tensors_in([out]):
                setattr(tensor, _LOGITS, logits)


_WEIGHT, _LOGITS = "_hybrid_weight", "_hybrid_logits"


def _lookup_options(
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: Any = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> str:
    """Why a lookup has no vocabulary-parallel form; empty if it has one."""
    if max_norm is not None:
        return f"max_norm={max_norm} rewrites the rows that are looked up"
    if scale_grad_by_freq:
        return "scale_grad_by_freq=True counts lookups over all rows"
    return "sparse=True gives sparse gradients" if sparse else ""
