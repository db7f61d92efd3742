"""Gathers the layer of parameters for code that uses them outside of its forward, such as a loss in chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lightning_hybrid.zero.gather_parameters_and_reduce_gradients import ZeroSharding


def gathered_for_other_code(zero: ZeroSharding | None) -> Callable[[nn.Module], contextlib.AbstractContextManager[Any]]:
    """Return a context, for a module, around code that uses its parameters and saves them for a backward.

    Where ranks gather layer by layer, the context is collective, as a forward of the layer is.
    """
    if zero is None:
        return lambda module: contextlib.nullcontext()
    layer_of = {id(parameter): group.fqn for group in zero.groups for parameter in group.parameters.values()}

    @contextlib.contextmanager
    def gathered(module: nn.Module) -> Iterator[None]:
        # The groups without a layer are gathered for the whole step.
        fqns = dict.fromkeys(layer_of.get(id(parameter), "") for parameter in module.parameters())
        missing = [fqn for fqn in fqns if fqn and fqn not in zero.running_layers]

        with contextlib.ExitStack() as stack:
            for fqn in missing:
                stack.enter_context(zero.inside(fqn))
            stack.enter_context(zero.saved_views(missing).of_layer())
            yield

    return gathered
