"""A second device where there is one: the host is treated as another device than the CPU that computes.

Tensors that are moved to it are not copied, but marked by their storage. `tensor.device` returns the marked
device, and errors of two real devices are raised: for an operation that reads both, a gradient on another device than
its parameter, a message from the host.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from harness.strict_group import as_on_gpus
from lightning_hybrid.optimizers import full_step as offload_at_once
from lightning_hybrid.optimizers import layer_step as offload
from lightning_hybrid.optimizers.state_file import Region
from lightning_hybrid.shared_memory import sockets as streams
from lightning_hybrid.zero import storage as homes

PRETENDED = torch.device("xpu", 0)
CPU = torch.device("cpu")
MAY_MIX = {"copy_", "_foreach_copy_"}


class Marks:
    """Storages that are on the pretended host."""

    def __init__(self):
        self._away = {}
        self.num_moved = 0

    def device(self, tensor):
        if tensor.device.type != "cpu":
            return tensor.device
        found = self._away.get(tensor.untyped_storage()._cdata)
        return PRETENDED if found is not None and not found.expired() else CPU

    def mark(self, tensor):
        storage = tensor.untyped_storage()
        self._away[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def moved(self, tensor, device):
        if self.device(tensor) == device:
            return tensor
        self.num_moved += 1
        content = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        # The copy of an offloaded tensor is not offloaded.
        self._away.pop(content.untyped_storage()._cdata, None)
        content.copy_(tensor)
        return self.mark(content) if device == PRETENDED else content


class Operations(TorchDispatchMode):
    """Each operation reads tensors of one device, and its results are on it."""

    def __init__(self, marks):
        super().__init__()
        self._marks = marks

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) in (Tensor, torch.nn.Parameter)]
        with torch._C.DisableTorchFunction():
            found = {self._marks.device(tensor) for tensor in given if tensor.dim() or len(given) == 1}
        name = func._opname
        if name not in MAY_MIX:
            if func.namespace == "c10d" and PRETENDED in found:
                raise RuntimeError(f"{func} sends what is on the host")
            if PRETENDED in found and CPU in found:
                raise RuntimeError(f"{func} reads what is on the host and what is not")
        out = func(*args, **kwargs)
        if PRETENDED in found and name not in MAY_MIX:
            with torch._C.DisableTorchFunction():
                for leaf in pytree.tree_leaves(out):
                    if isinstance(leaf, Tensor):
                        self._marks.mark(leaf)
        return out


class Devices(TorchFunctionMode):
    """Device queries and arguments of code."""

    def __init__(self, marks):
        super().__init__()
        self._marks = marks

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func == Tensor.device.__get__:
            return self._marks.device(args[0])
        if func == Tensor.grad.__set__ and args[1] is not None:
            where, of_parameter = (self._marks.device(each) for each in args[::-1])
            assert where == of_parameter, "a gradient is not where its parameter is"
        if name in ("to", "cpu") and isinstance(args[0], Tensor) and args[0].device.type == "cpu":
            given = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, str | torch.device)]
            named = [torch.device(each) for each in given]
            device = CPU if name == "cpu" else (named or [self._marks.device(args[0])])[0]
            rest = [CPU if isinstance(each, str | torch.device) else each for each in args[1:]]
            kwargs |= {"device": CPU} if kwargs.get("device") is not None else {}
            out = func(self._marks.moved(args[0], device), *rest, **kwargs)
            return self._marks.mark(out) if device == PRETENDED else out
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == PRETENDED.type:
            return self._marks.mark(func(*args, **{**kwargs, "device": CPU}))
        return func(*args, **kwargs)


class SimulatedHost(Callback):
    """A fit in which the host is another device; records the device of each kind within and between steps."""

    recorded = None

    def __init__(self):
        self._undo = contextlib.ExitStack()

    def setup(self, trainer, pl_module, stage):
        self.seen = {"between": set(), "within": set(), "states": set()}
        for module in (homes, offload, offload_at_once):
            self._undo.callback(setattr, module, "HOST", module.HOST)
            module.HOST = PRETENDED
        self._marks = Marks()
        in_file = Region.tensor
        self._undo.callback(setattr, Region, "tensor", in_file)
        Region.tensor = lambda *args: self._marks.mark(in_file(*args))
        self._undo.callback(setattr, torch.autograd, "_engine_run_backward", torch.autograd._engine_run_backward)
        torch.autograd._engine_run_backward = self._backward(torch.autograd._engine_run_backward)
        self._undo.enter_context(Operations(self._marks))
        self._undo.enter_context(Devices(self._marks))

    def _backward(self, run):
        """A mode is off while it answers `torch.autograd.backward`, and so in hooks on gradients."""

        def backward(*args, **kwargs):
            with Devices(self._marks):
                return run(*args, **kwargs)

        return backward

    def on_train_start(self, trainer, pl_module):
        [zero] = [each for each in trainer.strategy.run.active.members if each.groups]
        finish = zero._finish

        def seen_in_the_step():
            for group in zero._all:
                for name in group._placements:
                    gradient = group._gradients.get(name)
                    if gradient is not None:
                        self.seen["within"].add((group._shards[name].device.type, gradient.device.type))
            finish()

        zero._finish = seen_in_the_step

    def on_train_batch_end(self, trainer, pl_module, *_):
        with torch._C.DisableTorchFunction():  # otherwise full tensors are read
            for p in pl_module.parameters():
                if p.grad is not None and p.numel() > 1:
                    assert self._marks.device(p) == self._marks.device(p.grad)
                    self.seen["between"].add(self._marks.device(p).type)
        for optimizer in trainer.optimizers:
            tensors = [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]
            self.seen["states"] |= {value.device.type for value in tensors if value.numel() > 1}

    def on_train_end(self, *_):
        self.recorded = self.seen

    def teardown(self, trainer, pl_module, stage):
        self._undo.close()

    def on_exception(self, *_):
        self._undo.close()


@contextlib.contextmanager
def on_separate_hosts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_host", lambda: f"host {dist.get_rank()}")
        yield


TRANSPORTS = {"one host": contextlib.nullcontext, "two hosts": on_separate_hosts, "as on GPUs": as_on_gpus}
