"""The techniques of a run as one, while its steps run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from itertools import chain
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.techniques.technique import Active


class Actives(Active):
    """Several techniques, from the outermost around a layer to the innermost.

    Each method calls those of its members that do something, so that a step pays for nothing else.
    """

    def __init__(self, members: Sequence[Active] = ()) -> None:
        self.members = tuple(members)
        self.reduces_gradients = any(each.reduces_gradients for each in members)
        self.can_roll_back = all(each.can_roll_back for each in members)
        self.guards_loaders = all(each.guards_loaders for each in members)
        self.replaces_layers = any(type(each).running is not Active.running for each in members)
        self._of: dict[str, list[Any]] = {}

    def _methods(self, name: str) -> list[Any]:
        """The methods of this name that do something, the innermost technique's first."""
        if name not in self._of:
            members = [each for each in self.members if getattr(type(each), name) is not getattr(Active, name)]
            self._of[name] = [getattr(each, name) for each in reversed(members)]
        return self._of[name]

    def _around(self, name: str, *args: Any) -> AbstractContextManager[Any]:
        """Enter the contexts of a name, the innermost technique's first."""
        methods = self._methods(name)
        if len(methods) < 2:
            return methods[0](*args) if methods else nullcontext()
        return _entered(methods, args)

    def _call(self, name: str, *args: Any) -> None:
        for method in self._methods(name):
            method(*args)

    @property
    def groups(self) -> Sequence[Any]:
        """Those of all."""
        return [group for each in self.members for group in each.groups]

    @property
    def regions(self) -> dict[int, Any]:
        """Those of all."""
        return dict(chain.from_iterable(each.regions.items() for each in self.members))

    def step(self, num_microbatches: int = 0) -> AbstractContextManager[None]:
        """Around a step, for all."""
        return self._around("step", num_microbatches)

    def user_step(self, are_averaged: Callable[[], bool]) -> AbstractContextManager[None]:
        """Around a step of manual optimization, for all."""
        return self._around("user_step", are_averaged)

    def before_backward(self, stage: int, is_last: bool) -> None:
        """Begin a backward of all."""
        self._call("before_backward", stage, is_last)

    def after_backward(self, stage: int, is_last: bool) -> None:
        """End a backward of all."""
        self._call("after_backward", stage, is_last)

    def complete_gradients(self) -> None:
        """Finish the gradients of all."""
        self._call("complete_gradients")

    def around_step(self) -> AbstractContextManager[Any]:
        """Around one run of the user's step, for all."""
        return self._around("around_step")

    def unpartitioned(self) -> AbstractContextManager[None]:
        """Around an evaluation step that each replica runs by itself, for all."""
        return self._around("unpartitioned")

    def begin_evaluation(self) -> None:
        """Begin batches that replicas run without each other, for all."""
        self._call("begin_evaluation")

    def end_evaluation(self) -> None:
        """End them, for all."""
        self._call("end_evaluation")

    def running(self) -> AbstractContextManager[None]:
        """Replace the forwards of layers inside: a technique's goes around the forwards of inner ones."""
        return self._around("running")

    def settle(self) -> None:
        """Join what other ranks still do, for all."""
        self._call("settle")

    def forget(self) -> None:
        """Layers hold full parameters from now on, for all."""
        self._call("forget")

    def gathered(self, module: nn.Module) -> AbstractContextManager[None]:
        """Around code outside of layers that uses a module's parameters, for all."""
        return self._around("gathered", module)

    def step_in_backward(self, step: Callable[[AbstractContextManager[list[nn.Parameter]]], None]) -> None:
        """Let all call ``step``."""
        self._call("step_in_backward", step)

    def allow_rank_local_reads(self, mesh: Any) -> None:
        """Let code outside steps read parameters of all on some ranks only."""
        self._call("allow_rank_local_reads", mesh)

    def gather_for_this_rank(self, parameter: Tensor) -> None:
        """Gather a parameter, of any shape, for such code."""
        self._call("gather_for_this_rank", parameter)

    def free_rank_local_reads(self) -> None:
        """End such code; collective."""
        self._call("free_rank_local_reads")

    @cached_property
    def of_steps(self) -> Actives:
        """The members whose layers run so while a training step runs."""
        return Actives([each for each in self.members if not each.keeps_compiled])

    @cached_property
    def until_backward(self) -> Actives:
        """The members whose layers run so in evaluation too, and until the backward is over."""
        return Actives([each for each in self.members if each.keeps_compiled])


@contextmanager
def _entered(methods: Collection[Callable[..., AbstractContextManager[Any]]], args: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for method in methods:
            stack.enter_context(method(*args))
        yield
