"""The uses of vocabulary weights in a step, and the choice of those that are sharded by vocabulary.

A weight can be sharded by vocabulary if it is only looked up (``F.embedding``) or multiplied by, so that each of its
rows makes one number of an output (``F.linear``, ``h @ weight.t()``). A tied weight is sharded once for all its uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_hybrid.step.objects.names import CASTS, names, operator_names
from lightning_hybrid.step.objects.pytree import flatten_call
from lightning_hybrid.step.tracing.mode import _METADATA, user_line
from lightning_hybrid.tensor.shard_state.mark_sharded_values import tensors_in

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
    """The uses of one weight in a step.

    Attributes:
        dims: The dims along which it is used as a vocabulary.
        is_table: Whether it is looked up.
        is_head: Whether something is multiplied by it.
        reads_loss: Whether a loss reads the product, as logits.
        reads_others: Description of another reader of the product; empty if none.
        biases: Parameters that are added to the product.
        outside: Whether code outside of its unit uses it.
        other: Description of another use of the weight; empty if none.
    """

    dims: set[int] = field(default_factory=set)
    is_table: bool = False
    is_head: bool = False
    reads_loss: bool = False
    reads_others: str = ""
    biases: set[str] = field(default_factory=set)
    outside: bool = False
    other: str = ""


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
