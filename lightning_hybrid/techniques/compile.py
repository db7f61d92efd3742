"""``torch.compile`` of layers, one by one, inside of the strategy's wrappers around layers.

Structurally equal layers are compiled once. Each kind has a function of its own whose argument is the layer, so that
torch's cache for that function sees one program with other parameters, and a layer of another kind never counts against
its limit. The user's modules are unchanged: only while a step runs, their instances' forwards are replaced.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.randomness.keyed import KeyedRandomness, unwatched
from lightning_hybrid.step.objects.modules import find_layers
from lightning_hybrid.step.recording.units import choose_units
from lightning_hybrid.step.standins.tensors import full_shape, is_absent, materialize_call
from lightning_hybrid.step.tracing.compiled import compiled_modules
from lightning_hybrid.strategies.options.options import compile_options
from lightning_hybrid.techniques.technique import Active, Technique
from lightning_hybrid.tensor.runtime.compiled import CompiledRegionInputs, why_not_compiled
from lightning_hybrid.tensor.runtime.model import ShardedModel
from lightning_hybrid.text import spanned

_GRAPH_MODES = ("reduce-overhead", "max-autotune")


class CompiledLayers(Technique):
    """Layers run through ``torch.compile``."""

    def __init__(self) -> None:
        self.units: CompiledUnits | None = None

    def choose(self, run: Any) -> CompiledUnits:
        """Choose the layers of this rank that run compiled, in a run that is built or only planned."""
        setting, plan = run.setting, run.plan
        options = compile_options(setting.options.compile) or {}
        has_runner, synced = run.runner is not None, setting.norms is not None
        self.units = CompiledUnits(
            setting.module, options, setting.device, in_microbatches=has_runner, synced_norms=synced
        )
        if plan is None:
            self.units.choose()
        else:
            if plan.first is not None:
                units, drawing = plan.first.recording.units, plan.first.recording.graph.draws
            else:  # no step was recorded
                units, drawing = choose_units(setting.module, 1), [name for name, _ in setting.module.named_modules()]
            self.units.choose(units, run.shards, drawing, run.randomness)
        return self.units

    def build(self, run: Any, owner: Any) -> Active:
        """Choose the layers of this rank that run compiled."""
        units = self.choose(run)
        run.until_end.enter_context(share_compile_processes(run.setting.world.num_processes))
        return _Compiled(units, owner)

    def lines(self, run: Any) -> list[str]:
        """Return which layers are compiled, and why others are not."""
        return (self.units or self.choose(run)).lines()


class _Compiled(Active):
    """The layers of this rank, while they run.

    Those that draw random numbers draw others than the one process that a first step is compared with.
    """

    keeps_compiled = True

    def __init__(self, units: CompiledUnits, owner: Any) -> None:
        self._units, self._owner = units, owner

    def running(self) -> AbstractContextManager[None]:
        """Run layers compiled inside."""
        return nullcontext() if self._owner.is_verifying and self._units.draws else self._units.running()


class CompiledUnits:
    """The units of one module that run compiled.

    Attributes:
        reasons: Why units are not compiled, by FQN.
        kinds: The FQNs of compiled units, grouped by structure.

    Raises:
        ValueError: There is no compiler, or a mode that keeps one microbatch's activations only.
    """

    def __init__(
        self,
        root: nn.Module,
        options: Mapping[str, Any],
        device: torch.device,
        *,
        in_microbatches: bool,
        synced_norms: bool = False,
    ) -> None:
        self._root, self._options = root, dict(options)
        self._synced_norms = synced_norms  # BatchNorm communicates, which no compiler may trace
        self._randomness: KeyedRandomness | None = None
        self._local_units: dict[str, nn.Module] = {}  # by this rank, of those that are compiled
        self._runs: dict[str, Callable[..., Any]] = {}  # of those that no ranks share
        self._shards: ShardedModel | None = None
        self._drawing: Collection[str] = ()
        self.reasons: dict[str, str] = {}
        self.kinds: list[list[str]] = []
        if self.backend == "inductor":
            check_compiler(device)
        if in_microbatches and device.type == "cuda" and options.get("mode") in _GRAPH_MODES:
            raise ValueError(
                f"compile={dict(options)} replays CUDA graphs, which overwrite what other microbatches still need for"
                " their backward; leave the mode out, or set pipeline_parallel_size=1 and num_microbatches=1"
            )

    @property
    def backend(self) -> str:
        """Name of the compiler backend."""
        backend = self._options.get("backend", "inductor")
        return backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)

    def choose(
        self,
        units: Mapping[str, nn.Module] | None = None,
        shards: ShardedModel | None = None,
        drawing: Collection[str] = (),
        randomness: KeyedRandomness | None = None,
    ) -> None:
        """Choose the units to compile, once remote parameters are absent, and local ones sharded.

        Without a pipeline, ``units`` are those of one stage. ``drawing`` are FQNs of modules that draw random numbers,
        which ``randomness`` keys.
        """
        self._randomness, self._shards, self._drawing = randomness, shards, drawing
        by_user = compiled_modules(self._root, () if units is None else units.values())
        plans = {} if shards is None else shards.plans
        shards_sequence = any(plan.positions is not None for plan in plans.values())
        outside = any(plan.outside for plan in plans.values())
        by_kind: dict[Hashable, list[str]] = {}
        modules = find_layers(choose_units(self._root, 1) if units is None else units)
        for fqn, module in modules.items():
            if _is_one_operation(module):
                continue
            plan = plans.get(fqn)
            if any(id(inner) in by_user for inner in module.modules()):
                self.reasons[fqn] = "compiled by you"
            elif self._synced_norms and any(isinstance(inner, _BatchNorm) for inner in module.modules()):
                self.reasons[fqn] = "its BatchNorm is synced over replicas"
            elif shards_sequence:
                self.reasons[fqn] = "positions are sharded over ranks"
            elif outside:
                self.reasons[fqn] = "code outside of layers uses weights that are sharded by their vocabulary"
            elif plan is not None and plan.num_sharded and (reason := why_not_compiled(module, plan)):
                self.reasons[fqn] = reason
            else:
                key = _kind(module) if "forward" not in module.__dict__ else fqn
                by_kind.setdefault(key, []).append(fqn)
        self.kinds = list(by_kind.values())
        for number, fqns in enumerate(self.kinds):
            run = self._compiled(_function_of_kind(number))
            for fqn in fqns:
                module = modules[fqn]
                if any(is_absent(parameter) for parameter in module.parameters()):
                    continue
                self._local_units[fqn] = module
                if shards is not None and plans[fqn].num_sharded:
                    shards.compile(fqn, self._keyed(fqn, unwatched(run)))
                    continue
                own = module.__dict__.get("forward")
                call = partial(_call, run, module) if own is None else self._compiled(own)
                call = self._keyed(fqn, unwatched(call))
                self._runs[fqn] = call if shards is None else _materializing(call)

    def _keyed(self, fqn: str, run: Callable[..., Any]) -> Callable[..., Any]:
        draws = any(name == fqn or name.startswith(fqn + ".") for name in self._drawing)
        return run if self._randomness is None or not draws else self._randomness.keyed_on_entry(fqn, run)

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, **self._options)

    @property
    def draws(self) -> bool:
        """Whether compiled units draw random numbers, which differ from those without a compiler."""
        drawing = any(name == fqn or name.startswith(fqn + ".") for name in self._drawing for fqn in self._local_units)
        return drawing or self._randomness is None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the units compiled inside."""
        import torch._dynamo.config as config

        units = {fqn: self._local_units[fqn] for fqn in self._runs}
        # Layers that read their own number are compiled one by one; none may fall back to running uncompiled.
        limit = max(config.recompile_limit, 8 + 4 * len(self._local_units))
        total = max(config.accumulated_recompile_limit, 8 * limit)
        with (
            nullcontext() if self._randomness is None else self._randomness.opaque(self._local_units),
            config.patch(recompile_limit=limit, accumulated_recompile_limit=total),
            nullcontext() if self._shards is None else self._shards.compiling(),
            replaced_forwards(units, lambda fqn, _: self._runs[fqn], reason="runs compiled units"),
        ):
            yield

    def lines(self) -> list[str]:
        """Return lines that list compiled and uncompiled units."""
        lines = []
        for fqns in self.kinds:
            lines.append(f"compiled with {self.backend}: {spanned(fqns)}")
        by_reason: dict[str, list[str]] = {}
        for fqn, reason in self.reasons.items():
            by_reason.setdefault(reason, []).append(fqn)
        lines += [f"not compiled ({reason}): {spanned(fqns)}" for reason, fqns in by_reason.items()]
        return lines or ["nothing to compile: the module has no layers of more than one operation"]


def _kind(module: nn.Module) -> Hashable:
    """Return a key that is equal for layers that may share a function; torch finds their other differences."""
    return tuple((name, type(inner), *map(_member_kind, _tensors(inner))) for name, inner in module.named_modules())


def _member_kind(member: tuple[str, torch.Tensor | None]) -> Hashable:
    name, tensor = member
    return name, None if tensor is None else (full_shape(tensor), tensor.dtype)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    yield from module._parameters.items()
    yield from module._buffers.items()


def _materializing(run: Callable[..., Any]) -> Callable[..., Any]:
    """Materialize deferred tensors, which a compiler does not know, before the call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = materialize_call(args, kwargs)
        return run(*args, **kwargs)

    return call


def _call(run: Callable[..., Any], unit: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return run(unit, None, args, kwargs)


def _function_of_kind(number: int) -> Callable[..., Any]:
    """Make a function with a cache of its own; torch keeps one for each code object."""

    def run(unit: Any, entered: CompiledRegionInputs | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = type(unit).forward(unit, *args, **kwargs)
        if entered is not None:
            entered.known.clear()
        return output

    code = run.__code__.replace(co_name=f"unit_of_kind_{number}")
    return types.FunctionType(code, run.__globals__, code.co_name)


def _is_one_operation(module: nn.Module) -> bool:
    """Whether there is nothing to fuse: a linear, an embedding or a norm of torch's own."""
    return not any(True for _ in module.children()) and type(module).__module__.startswith("torch.nn.modules.")


def check_compiler(device: torch.device) -> None:
    """Check that torch's own backend finds its compiler on this machine.

    Raises:
        ValueError: It does not; the message says what to install.
    """
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if has_triton():
            return
        missing, install = "Triton", "install it (pip install triton)"
    else:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
            return
        except InvalidCxxCompiler:
            tried = os.environ.get("CXX") or "g++, clang++"
            missing, install = f"a C++ compiler ({tried})", "install one (such as g++), or name yours in CXX"
    raise ValueError(
        f"compile='units' needs {missing} for device {device} and this machine has none; {install}, or set"
        " compile={'backend': 'aot_eager'}, which needs no compiler and gains little, or leave compile out"
    )


@contextlib.contextmanager
def share_compile_processes(num_processes: int) -> Iterator[None]:
    """Limit the compile processes of this rank to its share: ranks of one node compile at the same time."""
    if "TORCHINDUCTOR_COMPILE_THREADS" in os.environ:
        yield
        return
    import torch._inductor.config as config

    with config.patch(compile_threads=max(1, (os.cpu_count() or 1) // max(1, num_processes))):
        yield
