"""Optimizer steps on the host for parameters on a GPU: copies in both directions run while another layer is stepped.

    to the host    [grads 0][grads 1][grads 2]            a side stream, into pinned memory
    host thread             [step 0 ][step 1 ][step 2 ]
    to the GPU                       [params 0][params 1][params 2]    another side stream

A submitted layer waits for nothing but a free slot, so the GPU may go on with its backward meanwhile.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lightning_hybrid.host_copies import HostCopies
from lightning_hybrid.optimizers.replacement import STEP_HOOKS
from lightning_hybrid.optimizers.trial import copy_of_rank

_SLOTS = 4  # layers whose pinned copies are alive: two being copied, one stepped, one waiting


class HostStepPipeline:
    """Steps copies of parameters on the host by a copy of their optimizer, with the same states.

    Attributes:
        host_optimizer: Steps the copies; its groups have the parameters of one layer at a time.
    """

    def __init__(self, optimizer: Optimizer, copies: HostCopies) -> None:
        """Start a thread."""
        self._optimizer, self._copies = optimizer, copies
        self.host_optimizer: Any = copy_of_rank(optimizer)
        self.host_optimizer.__dict__.pop("step", None)  # a replacement of the step of the original
        for name in STEP_HOOKS:
            self.host_optimizer.__dict__[name] = OrderedDict()
        self.host_optimizer.__dict__.update(param_groups=[], state=defaultdict(dict))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="optimizer step on the host")
        self._slots = threading.Semaphore(_SLOTS)
        self._pending: list[Future[None]] = []

    def submit(
        self,
        parameters: Sequence[Tensor],
        kwargs: dict[str, Any],
        *,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        """Begin to step parameters with dense gradients; both may be freed or read on the current stream at once.

        Parameters have any shape. ``before`` and ``after`` are called on the thread; the former makes states available.
        """
        self._slots.acquire()
        values = [tensor for p in parameters for tensor in (p.data, p.grad) if tensor is not None]
        copied, arrival = self._copies.to_host(values, may_be_freed=True)
        on_host = [
            nn.Parameter(value, requires_grad=p.requires_grad) for p, value in zip(parameters, copied[::2], strict=True)
        ]
        for copy_of_p, gradient in zip(on_host, copied[1::2], strict=True):
            copy_of_p.grad_dtype = None  # any: of the parameter, or float32
            copy_of_p.grad = gradient
        increment_version(list(parameters))  # an operation of the backward that still reads one is an error
        layer = [(p, p.data, copy_of_p) for p, copy_of_p in zip(parameters, on_host, strict=True)]

        def run() -> None:
            try:
                before()
                arrival.synchronize()
                self._step(layer, kwargs)
                after()
                self._copies.into([(data, copy_of_p.data) for _, data, copy_of_p in layer])
            finally:
                self._slots.release()

        self._pending.append(self._thread.submit(run))

    def _step(self, layer: Sequence[tuple[Tensor, Tensor, nn.Parameter]], kwargs: dict[str, Any]) -> None:
        host, by_id = self.host_optimizer, {id(p): on_host for p, _, on_host in layer}
        host.param_groups = [
            {**group, "params": [by_id[id(p)] for p in group["params"] if id(p) in by_id]}
            for group in self._optimizer.param_groups
        ]
        host.state.update((on_host, self._optimizer.state[p]) for p, _, on_host in layer)
        host.step(**kwargs)
        host.param_groups = []
        host.state.clear()

    def wait(self) -> None:
        """Wait for the steps of all layers, and let the current stream wait for the new values.

        Raises:
            Exception: That of a step.
        """
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()
        self._copies.wait()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
