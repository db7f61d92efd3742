"""Linear layers that multiply in float8, by torchao, for the time of a run.

Inputs, weights and gradients are cast to float8 for the three products of a layer, each with a scale that its largest
element gives; parameters, states and checkpoints stay as they are. Scales are powers of two, so that a value is rounded
to the same number whatever the scale of its tensor, unless it is much smaller than the largest element: a batch that is
split over microbatches and replicas, which have scales of their own, gives the results of the full batch.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from lightning_hybrid.errors import Float8Error
from lightning_hybrid.layout import SIZE_OPTIONS, ParallelLayout
from lightning_hybrid.precision.capability import FLOAT8, dotted
from lightning_hybrid.text import meant_of

_MULTIPLE = 16  # of the sizes that the products of a GPU take
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LISTED = 8


@dataclass(frozen=True)
class Float8:
    """Linear layers multiply in float8 (`HybridPrecision(..., float8=Float8())`).

    Each `torch.nn.Linear` becomes a float8 layer of torchao (extra `torchao`) when a run starts, with the same
    parameters, and is put back when it ends. Left as they are: layers whose sizes are no multiples of 16, subclasses,
    layers with hooks; they are listed when a run starts.

    Args:
        exclude: Patterns of FQNs of layers that stay as they are, such as `"head"` or `"layers.0.*"`; `*` matches any
            characters.
        recipe: torchao's: one scale per tensor, one per row, or one per row with the gradients of weights in high
            precision.
        emulate: Cast to float8, but multiply in the precision of the layer: on any device, slowly.

    Raises:
        Float8Error: The recipe is unknown.
    """

    exclude: Sequence[str] = ()
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    emulate: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.exclude, str):
            object.__setattr__(self, "exclude", (self.exclude,))
        known = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
        if self.recipe not in known:
            raise Float8Error(
                f"Float8(recipe={self.recipe!r}) is unknown; use one of {', '.join(known)}", entry="float8-recipe"
            )

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuse layouts that shard the tensors of one product, whose scale no rank would know."""
        for axis in ("tp", "cp", "ep"):
            if (size := layout.by_axis[axis]) > 1:
                raise Float8Error(
                    f"{SIZE_OPTIONS[axis]}={size} shards the tensors of a layer over ranks, but float8 scales each"
                    f" tensor by its largest element, which is on one of them; set {SIZE_OPTIONS[axis]}=1 (stages,"
                    " replicas and zero_stage work), or leave float8 out",
                    entry="float8-layout",
                )

    def convert(self, root: nn.Module) -> Float8Layers:
        """Replace the linear layers of a module.

        Raises:
            Float8Error: torchao is missing, the device has no products in float8, a pattern matches no linear layer, or
                no layer is left to convert.
        """
        config = _config(self.recipe, self.emulate)
        self.check_device()
        linears = {name: m for name, m in root.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
        self._check_patterns(root, list(linears))
        reasons = {name: self._why_not(name, linear) for name, linear in linears.items()}
        layers = Float8Layers({name: why for name, why in reasons.items() if why})
        if len(layers.left) == len(linears):
            raise Float8Error(
                f"float8: {type(root).__name__} has no linear layer to convert: {layers.describe_left()}; change"
                " exclude or the sizes, or leave float8 out",
                entry="float8-none",
            )
        layers.convert(root, [name for name, why in reasons.items() if not why], config)
        return layers

    def check_device(self) -> None:
        """Check that the device has products in float8, unless they are emulated.

        Raises:
            Float8Error: It has none.
        """
        if not self.emulate:
            _check_device()

    def check_autocast(self) -> None:
        """Check that torchao's layers follow autocast.

        Raises:
            Float8Error: They do not on a CPU, where gradients of weights are in high precision.
        """
        if self.emulate and self.recipe == "rowwise_with_gw_hp" and not torch.cuda.is_available():
            raise Float8Error(
                'Float8(recipe="rowwise_with_gw_hp", emulate=True) does not follow autocast on a CPU: its backward'
                ' would mix dtypes; set recipe="rowwise", or precision="bf16-true" or "32-true"',
                entry="float8-autocast",
            )

    def _check_patterns(self, root: nn.Module, names: Sequence[str]) -> None:
        for pattern in self.exclude:
            if not fnmatch.filter(names, pattern):
                raise Float8Error(
                    f"Float8(exclude=...) names {pattern!r}, which matches none of the {len(names)} linear layers of"
                    f" {type(root).__name__}{meant_of(pattern, names)}",
                    entry="float8-exclude",
                )

    def _why_not(self, name: str, linear: nn.Linear) -> str:
        """Why a layer stays as it is; empty if it is converted."""
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude):
            return "excluded"
        if type(linear) is not nn.Linear or "forward" in vars(linear):
            return f"a {type(linear).__name__} with a forward of its own"
        if any(getattr(linear, hooks) for hooks in _HOOKS):
            return "has hooks"
        sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
        wrong = [f"{what}={size}" for what, size in sizes.items() if size % _MULTIPLE]
        return f"{' and '.join(wrong)}, no multiple of {_MULTIPLE}" if wrong else ""


class _Place(NamedTuple):
    parent: nn.Module
    name: str
    linear: nn.Linear


@dataclass
class Float8Layers:
    """The linear layers of a module that are converted, until `restore`."""

    left: dict[str, str]  # why others are as they were, by FQN
    _places: list[_Place] = field(default_factory=list)

    def convert(self, root: nn.Module, names: Sequence[str], config: Any) -> None:
        """Replace the layers of these FQNs."""
        from torchao.float8 import convert_to_float8_training

        converted = set(names)
        for name in names:
            parent, _, child = name.rpartition(".")
            self._places.append(_Place(root.get_submodule(parent), child, root.get_submodule(name)))  # type: ignore[arg-type]
        convert_to_float8_training(root, module_filter_fn=lambda _, name: name in converted, config=config)
        for place, new in self._pairs():
            # Attributes that the user set on the layer.
            vars(new).update((key, value) for key, value in vars(place.linear).items() if key not in vars(new))
            new.train(place.linear.training)

    def restore(self) -> None:
        """Put the user's own layers back, with the parameters that the converted ones have now."""
        for place, new in self._pairs():
            place.linear._parameters.update(new._parameters)
            place.linear.train(new.training)
            setattr(place.parent, place.name, place.linear)
        self._places.clear()

    def _pairs(self) -> Iterator[tuple[_Place, nn.Module]]:
        return ((place, getattr(place.parent, place.name)) for place in list(self._places))

    def describe_left(self) -> str:
        """The layers that are left, with the reasons."""
        by_reason: dict[str, list[str]] = {}
        for name, why in self.left.items():
            by_reason.setdefault(why, []).append(name)
        parts = []
        for why, names in by_reason.items():
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            parts.append(f"{', '.join(names[:_LISTED])}{more} ({why})")
        return "; ".join(parts) or "it has none"

    def __str__(self) -> str:
        """One line for the start of a run."""
        left = f"; not: {self.describe_left()}" if self.left else ""
        return f"float8: {len(self._places)} linear layers multiply in float8{left}"


def _config(recipe: str, emulate: bool) -> Any:
    try:
        from torchao.float8 import Float8LinearConfig
    except ImportError as error:
        raise Float8Error(
            f"float8 needs torchao, which cannot be imported ({error}); pip install 'lightning-hybrid[torchao]'",
            entry="float8-torchao",
        ) from error
    config = Float8LinearConfig.from_recipe_name(recipe)
    # Attributes of a frozen dataclass whose __post_init__ has filled in others.
    object.__setattr__(config, "emulate", emulate)
    object.__setattr__(config, "round_scales_to_power_of_2", True)
    object.__setattr__(config, "pad_inner_dim", True)  # batches of any number of rows
    return config


def _check_device() -> None:
    wanted = dotted(FLOAT8)
    change = "pass Float8(emulate=True), which is slow, or leave float8 out"
    if not torch.cuda.is_available():
        raise Float8Error(
            f"float8 products need a GPU of compute capability {wanted} or higher, and torch finds no GPU; {change}",
            entry="float8-device",
        )
    capability = torch.cuda.get_device_capability()
    if capability < FLOAT8:
        raise Float8Error(
            f"float8 products need compute capability {wanted} or higher, and {torch.cuda.get_device_name()} has"
            f" {dotted(capability)}; {change}",
            entry="float8-device",
        )
