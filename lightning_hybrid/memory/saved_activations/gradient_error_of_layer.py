"""The error that compression causes in the gradients of a layer, measured in its backward.

In one microbatch the layer keeps its saved tensors exactly too. When the gradient of its output arrives, the gradients
of its parameters are computed twice: from the exact tensors, and from the compressed ones.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from lightning_hybrid.memory.saved_activations.stored_storage import StoredStorage


class GradientError:
    """Measures one layer in a microbatch, the next one when it is asked again.

    Attributes:
        sums: Squared norms of the error and of the exact gradient, of the layers measured since they were set to zero.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers, self._number = layers, 0
        self._due: str | None = None
        self.sums = [0.0, 0.0]
        uses = Counter(id(parameter) for layer in layers.values() for parameter in set(layer.parameters()))
        self._shared = {parameter for parameter, count in uses.items() if count > 1}

    def request(self) -> None:
        """Measures the next layer of this rank that stores what can be measured, in the microbatches to come."""
        if self._layers:
            self._due = list(self._layers)[self._number % len(self._layers)]
            self._number += 1

    def begins(self, fqn: str) -> bool:
        """Returns whether this run of a layer is measured; no other one is, then."""
        if self._due != fqn:
            return False
        self._due = None
        return True

    def measure(self, fqn: str, out: Any, stored: Sequence[StoredStorage]) -> None:
        """Measures once the gradient of the layer's output, a tensor of any shape, has arrived."""
        outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
        trained = [
            parameter
            for parameter in self._layers[fqn].parameters()
            if parameter.requires_grad and id(parameter) not in self._shared  # whose gradient comes from others too
        ]
        if not stored or len(outputs) != 1 or type(outputs[0]) is not Tensor or not trained:
            for each in stored:
                each.exact = None
            self.request()
            return
        edge = get_gradient_edge(outputs[0])
        # Autograd holds them as long as it needs them.
        references = [weakref.ref(each) for each in stored]

        def on_gradient(gradient: Tensor) -> None:
            handle.remove()
            alive = [each for reference in references if (each := reference()) is not None]
            found = []
            for uses_exact in (True, False):
                for each in alive:
                    each.uses_exact = uses_exact
                found.append(torch.autograd.grad([edge], trained, [gradient], retain_graph=True, allow_unused=True))
            for each in alive:
                each.exact = None
            for exact, compressed in zip(*found, strict=True):
                if exact is not None and compressed is not None:
                    self.sums[0] += float((compressed - exact).double().square().sum())
                    self.sums[1] += float(exact.double().square().sum())

        handle = outputs[0].register_hook(on_gradient)
