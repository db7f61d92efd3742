"""Optimizer steps on the host for parameters on a GPU: copies in both directions run while another layer is stepped.

    to the host    [grads 0][grads 1][grads 2]            a side stream, into pinned memory
    host thread             [step 0 ][step 1 ][step 2 ]
    to the GPU                       [params 0][params 1][params 2]    another side stream

A submitted layer waits for nothing but a free slot, so the GPU may go on with its backward meanwhile.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lightning_hybrid.optimizers.replacement import STEP_HOOKS

_SLOTS = 4  # layers whose pinned copies are alive: two being copied, one stepped, one waiting


class CudaCopies:
    """Asynchronous copies between a GPU and pinned memory, on a side stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        """Make the streams of a GPU."""
        self._device = device
        self._to_host, self._to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Begin to copy tensors that the current stream has computed; they may be freed at once.

        Returns:
            The copies, of the same shapes and strides, and a function that waits for them.
        """
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._to_host):
            copies = [torch.empty_like(each, device="cpu", pin_memory=True) for each in tensors]
            for content, each in zip(copies, tensors, strict=True):
                content.copy_(each, non_blocking=True)
                each.record_stream(self._to_host)
            return copies, self._to_host.record_event().synchronize

    def to_device(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin to copy to tensors on the GPU; each comes with its source in pinned memory, of the same shape."""
        with torch.cuda.stream(self._to_device):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Let the current stream wait for all copies to the GPU."""
        torch.cuda.current_stream(self._device).wait_stream(self._to_device)


class HostStepPipeline:
    """Steps copies of parameters on the host by a copy of their optimizer, with the same states.

    Attributes:
        host_optimizer: Steps the copies; its groups have the parameters of one layer at a time.
    """

    def __init__(self, optimizer: Optimizer, copies: CudaCopies) -> None:
        """Start a thread.

        Args:
            optimizer: Of parameters on a GPU; its states are on the host.
            copies: Of that GPU.
        """
        self._optimizer, self._copies = optimizer, copies
        self.host_optimizer: Any = copy.copy(optimizer)
        self.host_optimizer.__dict__.pop("step", None)  # a replacement of the step of the original
        for name in STEP_HOOKS:
            self.host_optimizer.__dict__[name] = OrderedDict()
        self.host_optimizer.param_groups, self.host_optimizer.state = [], defaultdict(dict)
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

        Args:
            parameters: On the GPU, of any shape.
            kwargs: Of the optimizer's step.
            before: Called on the thread before the step: makes states available.
            after: Called on the thread after the step.
        """
        self._slots.acquire()
        values = [tensor for p in parameters for tensor in (p.data, p.grad) if tensor is not None]
        copied, wait = self._copies.to_host(values)
        on_host = [
            nn.Parameter(value, requires_grad=p.requires_grad) for p, value in zip(parameters, copied[::2], strict=True)
        ]
        for copy_of_p, gradient in zip(on_host, copied[1::2], strict=True):
            copy_of_p.grad = gradient
        increment_version(list(parameters))  # an operation of the backward that still reads one is an error
        layer = [(p, p.data, copy_of_p) for p, copy_of_p in zip(parameters, on_host, strict=True)]

        def run() -> None:
            try:
                before()
                wait()
                self._step(layer, kwargs)
                after()
                self._copies.to_device([(data, copy_of_p.data) for _, data, copy_of_p in layer])
            finally:
                self._slots.release()

        self._pending.append(self._thread.submit(run))

    def _step(self, layer: Sequence[tuple[Tensor, Tensor, nn.Parameter]], kwargs: dict[str, Any]) -> None:
        host, by_id = self.host_optimizer, {id(p): on_host for p, _, on_host in layer}
        host.param_groups = [
            {**group, "params": [by_id[id(p)] for p in group["params"] if id(p) in by_id]}
            for group in self._optimizer.param_groups
        ]
        host.state = defaultdict(dict, {on_host: self._optimizer.state[p] for p, _, on_host in layer})
        host.step(**kwargs)
        host.param_groups, host.state = [], defaultdict(dict)

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
