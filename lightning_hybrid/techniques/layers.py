"""A technique of the user: code around the layers of a rank, and around its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.techniques.technique import Active, Technique


@contextmanager
def computed_parameters(layer: nn.Module, compute: Callable[[nn.Parameter], Tensor]) -> Iterator[None]:
    """Let a layer compute with functions of its parameters inside the context; gradients pass through the functions.

    Args:
        layer: The layer.
        compute: Returns a tensor of the shape of its argument, or the argument.
    """
    before = [(inner, name, p) for inner in layer.modules() for name, p in inner._parameters.items() if p is not None]
    computed = {id(p): compute(p) for p in {id(p): p for *_, p in before}.values()}
    for inner, name, parameter in before:
        inner._parameters[name] = computed[id(parameter)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for inner, name, parameter in before:
            inner._parameters[name] = parameter


class LayerTechnique(Technique):
    """Runs code around the forward of each layer, and on complete gradients; override what it is to do.

    Layers are the largest modules that repeat, such as transformer blocks, and what stands beside them. The code runs
    inside of ZeRO's gathers, of recomputation and of stored activations, which therefore need not know of it, and
    around tensor ranks and compiled code. So a layer has full parameters, or their shards on tensor ranks.
    """

    def forward(self, name: str, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer; it is run again where it is recomputed, so the same call gives the same result.

        Args:
            name: FQN of the layer in the user's module.
            layer: The layer.
            forward: Its forward; call it with the arguments, or with others.
            *args: Positional arguments of the call.
            **kwargs: Keyword arguments of the call.

        Returns:
            Its output.
        """
        return forward(*args, **kwargs)

    def gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Change gradients once per step of the optimizer: averaged over replicas, before hooks and clipping.

        Every rank has the gradients of its stages; under ZeRO, ``parameter.grad`` is its shard of a flat gradient.

        Args:
            parameters: Parameters of this rank that have gradients, by FQN.
        """

    @property
    def changes_gradients(self) -> bool:  # type: ignore[override]
        """Whether it overrides ``gradients``."""
        return type(self).gradients is not LayerTechnique.gradients

    def build(self, run: Any, owner: Any) -> Active:
        """Connect the layers and parameters of this rank."""
        kind = _Gradients if type(self).forward is LayerTechnique.forward else _Layers
        return kind(self, run)

    def lines(self, run: Any) -> list[str]:
        """Return the line of the start table: the class."""
        return [f"technique: {type(self).__name__}"]


class _Gradients(Active):
    """The gradients of this rank."""

    def __init__(self, technique: LayerTechnique, run: Any) -> None:
        self._technique, self._module = technique, run.setting.module

    def complete_gradients(self) -> None:
        if self._technique.changes_gradients:
            self._technique.gradients({n: p for n, p in self._module.named_parameters() if p.grad is not None})


class _Layers(_Gradients):
    """The layers of this rank too, while a step runs."""

    def __init__(self, technique: LayerTechnique, run: Any) -> None:
        super().__init__(technique, run)
        self._layers = run.local_layers()

    def running(self) -> AbstractContextManager[None]:
        return replaced_forwards(self._layers, self._around, reason=type(self._technique).__name__)

    def _around(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        return partial(self._technique.forward, name, self._layers[name], forward)
