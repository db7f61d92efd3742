"""Lightning precision plugin for all number formats, which a strategy can connect to a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.namespace import package_in_use
from lightning_hybrid.params import store
from lightning_hybrid.params.shards import AxisSharding
from lightning_hybrid.precision.float8 import Float8, Float8Layers
from lightning_hybrid.precision.float32_step import Float32Step, Rounding, check_float32_options, round_to_nearest
from lightning_hybrid.precision.message_dtypes import MessageDtype, message_dtypes, parse_message_dtype
from lightning_hybrid.precision.norm import MeshNorm
from lightning_hybrid.precision.scaler import MeshGradScaler
from lightning_hybrid.precision.stochastic_rounding import KeyedRounding, ParameterNames
from lightning_hybrid.text import meant

PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true"]


class HybridPrecision(MixedPrecision):
    """Precision plugin that implements `Trainer(precision=...)` over a mesh.

    The strategies convert the plugin that the Trainer chose, so users need not name this class; except for float16
    with a loss scale on the CPU, which Lightning turns into bfloat16: `Trainer(plugins=[HybridPrecision("16-mixed")])`.

    Until `connect_mesh` it is Lightning's own plugin of the same precision.

    Args:
        precision: the number format, as Lightning spells it.
        device: where `torch.autocast` applies; by default where the model is.
        scaler: the settings of the loss scale, for "16-mixed" only.
        master_weights: the optimizer steps float32 copies of parameters and gradients, and the parameters are those
            copies, rounded; for "bf16-true" only. The copies are states of the optimizer.
        stochastic_rounding: the optimizer steps in float32, and new parameters are rounded to one of both neighbours
            in bfloat16, with probabilities of which the expectation is the float32 value; for "bf16-true" only. Its
            states are float32, and no float32 copies of parameters are kept.
        reduce_dtype: dtype in which gradients are sent and summed over replicas, with and without ZeRO, as in FSDP2's
            `MixedPrecisionPolicy`; that of the parameters if None. "float32", or `torch.float32`. With optimizers that
            step in float32 it is the dtype in which gradients of microbatches and batches are added too.
        gather_dtype: dtype in which ZeRO sends parameters (of FSDP2's `param_dtype`, the part that is sent); shards
            keep the parameters' dtype, which gathered values have too. That of the parameters if None.
        float8: multiply in the linear layers in float8; everything else stays in the precision above.

    Attributes:
        mesh: the mesh of `connect_mesh`.
        around_clipping: returns a context that is entered around the clipping of gradients.

    Raises:
        ValueError: the precision is unknown, or has no scaler but one was passed.
        PrecisionError: `master_weights` or `stochastic_rounding` with another precision, or both; a
            dtype of messages that is none of floating point.
        TypeError: the scaler is no plain `GradScaler`.
    """

    def __init__(
        self,
        precision: PrecisionName = "32-true",
        device: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        *,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        reduce_dtype: MessageDtype | torch.dtype | None = None,
        gather_dtype: MessageDtype | torch.dtype | None = None,
        float8: Float8 | None = None,
    ) -> None:
        # MixedPrecision's own __init__ is for two of the six precisions; its methods are right for the others too.
        if precision not in get_args(PrecisionName):
            names = get_args(PrecisionName)
            near = meant(str(precision), names)
            raise ValueError(f"precision={precision!r} is unknown; use one of {', '.join(names)}{near}")
        if scaler is not None and precision != "16-mixed":
            raise ValueError(
                f"precision={precision!r} takes no scaler but got {scaler}; leave it out, or set precision='16-mixed'"
            )
        check_float32_options(precision, master_weights=master_weights, stochastic_rounding=stochastic_rounding)
        self.master_weights, self.stochastic_rounding = master_weights, stochastic_rounding
        self.reduce_dtype = parse_message_dtype("reduce_dtype", reduce_dtype)
        self.gather_dtype = parse_message_dtype("gather_dtype", gather_dtype)
        self._float32_steps: list[Float32Step] = []  # while optimizers step in float32
        self.float8 = float8
        self._float8_layers = Float8Layers({})  # none yet
        self.precision = precision
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._follows_model = device is None
        self.scaler: MeshGradScaler | None = None
        if precision == "16-mixed":
            self.scaler = MeshGradScaler(self.device) if scaler is None else MeshGradScaler.of(scaler)
        # Parameters and inputs of the "-true" precisions have that dtype; the others only autocast to it.
        self._format: Precision = Precision()
        if precision in ("bf16-true", "16-true"):
            self._format = HalfPrecision(precision)
        elif precision == "64-true":
            self._format = DoublePrecision()
        self.mesh: Mesh | None = None
        self._norm: MeshNorm | None = None  # where other ranks have other gradients
        self.around_clipping: Callable[[], AbstractContextManager[None]] = nullcontext

    @classmethod
    def is_other(cls, plugin: Precision) -> bool:
        """Returns whether a plugin is of a custom class, whose behaviour a conversion would lose."""
        known = Precision, MixedPrecision, HalfPrecision, DoublePrecision
        return not isinstance(plugin, cls) and type(plugin) not in known

    @classmethod
    def of(cls, plugin: Precision) -> HybridPrecision:
        """Converts the plugin that Lightning chose; one of this class is returned unchanged.

        Raises:
            TypeError: the plugin is of a custom class.
        """
        if cls.is_other(plugin):
            name = f"{type(plugin).__module__}.{type(plugin).__qualname__}"
            raise TypeError(
                f"the precision plugin is a {name}; supported are Precision, MixedPrecision, HalfPrecision, "
                f"DoublePrecision of {package_in_use()} and {cls.__qualname__}, so set "
                f"Trainer(precision=...) to one of {', '.join(get_args(PrecisionName))} or subclass {cls.__qualname__}"
            )
        if isinstance(plugin, cls):
            return plugin
        return cls(plugin.precision, getattr(plugin, "device", None), getattr(plugin, "scaler", None))  # type: ignore[arg-type]

    def connect_mesh(
        self,
        mesh: Mesh,
        owned_parameters: Callable[[], Set[int]],
        axes: Sequence[str] = ("pp", "cp", "parts"),
        parts: Callable[[Tensor, Tensor], list[Tensor]] | None = None,
        around_clipping: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Extends loss scale and gradient norm to all ranks; makes `unscale_`, `step` and clipping collective.

        ``owned_parameters`` returns the ids of the parameters that this rank counts in a norm; they are distributed
        over ``axes``. ``parts`` returns the slices, of any shape, of a gradient that it counts, as in
        `MeshNorm`.
        """
        self.mesh, self.around_clipping = mesh, around_clipping
        norm = MeshNorm(mesh=mesh, owned_parameters=owned_parameters, axes=axes, parts=parts)
        self._norm = None if norm.is_local else norm
        if self.scaler is not None:
            self.scaler.mesh, self.scaler.around_unscaling = mesh, around_clipping

    @property
    def steps_in_float32(self) -> bool:
        """Whether optimizers step float32 copies of bfloat16 parameters."""
        return self.master_weights or self.stochastic_rounding

    def dtype_of_gradient(self, parameter: Tensor) -> torch.dtype:
        """The dtype in which gradients of a parameter of any shape are added, over microbatches and batches."""
        is_wide = self.steps_in_float32 and self.reduce_dtype is torch.float32 and parameter.dtype is torch.bfloat16
        return torch.float32 if is_wide else parameter.dtype

    @contextlib.contextmanager
    def adding_gradients(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Inside, gradients of parameters are added in another dtype where `dtype_of_gradient` is one."""
        chosen = [p for p in parameters if self.dtype_of_gradient(p) is not p.dtype]
        for p in chosen:
            store.set_gradient_dtype(p, torch.float32)
        try:
            yield
        finally:
            for p in chosen:
                store.set_gradient_dtype(p, None)

    @property
    def description(self) -> str:
        """The precision as Lightning spells it, with the options that are set."""
        dtypes = {name: dtype for name, dtype in message_dtypes(self).items() if dtype is not None}
        added = [name for name in ("master_weights", "stochastic_rounding") if getattr(self, name)]
        added += [f"{name}={str(dtype).removeprefix('torch.')}" for name, dtype in dtypes.items()]
        return f"{self.precision} with {', '.join(added)}" if added else self.precision

    def __repr__(self) -> str:
        """The class with the precision, for Lightning's messages."""
        return f"{type(self).__name__}({self.description!r})"

    def step_in_float32(
        self,
        optimizers: Sequence[Optimizer],
        names: Mapping[int, str],
        *,
        seed: int = 0,
        step: Callable[[], int],
        shardings: Sequence[AxisSharding] = (),
    ) -> Callable[[], None]:
        """Lets optimizers step in float32; returns the undo.

        ``seed`` is of stochastic rounding, and the same on all ranks; ``step`` returns the number of optimizer steps so
        far.

        Raises:
            PrecisionError: an optimizer needs a closure.
        """
        rounding: Rounding = round_to_nearest
        if self.stochastic_rounding:
            rounding = KeyedRounding(names, seed=seed, step=step, shardings=shardings)
        undo = contextlib.ExitStack()
        for optimizer in optimizers:
            self._float32_steps.append(Float32Step(optimizer, keeps_masters=self.master_weights, rounding=rounding))
            undo.callback(self._float32_steps[-1].close)
        return undo.close

    @property
    def loss_scale(self) -> float:
        """Current factor of the loss; 1.0 without a scaler."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Computes the 2-norm of the gradients, a scalar; over all ranks, and collective, if a mesh is connected."""
        if self._norm is None:
            return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        return self._norm.grad_norm(parameters)

    # --- Lightning's hooks -------------------------------------------------------------------------------------------

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Sets the autocast device from the model's parameters."""
        if self._follows_model:
            # Parameters of other stages may be on the meta device.
            devices = (parameter.device.type for parameter in model.parameters())
            self.device = next((device for device in devices if device != "meta"), self.device)
            if self.scaler is not None:
                self.scaler.check_device(self.device)
                self.scaler.use_device(self.device)
        if self.steps_in_float32 and not self._float32_steps:  # a strategy of Lightning's
            module: Any = getattr(model, "module", model)  # which it may have wrapped
            names = ParameterNames(module, optimizers)
            self.step_in_float32(optimizers, names, step=lambda: module.trainer.global_step)
        return super().connect(model, optimizers, lr_schedulers)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Converts parameters and buffers to the dtype of a "-true" precision, and linear layers to float8."""
        module = self._format.convert_module(module)
        if self.float8 is not None:
            self._float8_layers.restore()
            if self._is_mixed:
                self.float8.check_autocast()
            self._float8_layers = self.float8.convert(module)
            rank_zero_info(str(self._float8_layers))
        return module

    def convert_input(self, data: Any) -> Any:
        """Converts a batch to the dtype of a "-true" precision."""
        return self._format.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        """Converts outputs to the default dtype."""
        return self._format.convert_output(data)

    def tensor_init_context(self) -> AbstractContextManager:
        """Creates tensors in the dtype of a "-true" precision."""
        return self._format.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager:
        """Creates modules in the dtype of a "-true" precision."""
        return self._format.module_init_context()

    def forward_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Autocasts for a "-mixed" precision; sets the default dtype for a "-true" one."""
        return super().forward_context() if self._is_mixed else self._format.forward_context()

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips gradients by the norm over all ranks, or by value.

        Raises:
            RuntimeError: a fused optimizer in a "-mixed" precision, which unscales the gradients only in its step.
        """
        with self.around_clipping():
            if self._is_mixed:
                super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
            else:
                # MixedPrecision refuses fused optimizers; without a scaler their gradients are clipped as any other.
                Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clips gradients by the norm over all ranks."""
        if self._norm is None:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            self._norm.clip(self.main_params(optimizer), clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clips gradients by value; a rank may have no gradient that this optimizer steps, which torch refuses."""
        if any(parameter.grad is not None for parameter in self.main_params(optimizer)):
            super().clip_grad_by_value(optimizer, clip_val)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the state under the name of Lightning's plugin, so that a run can be resumed without this package."""
        if type(self).__qualname__ in checkpoint:
            checkpoint[MixedPrecision.__qualname__] = checkpoint.pop(type(self).__qualname__)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Loads the state that Lightning's plugin, or this one, has saved."""
        if MixedPrecision.__qualname__ in checkpoint:
            self.load_state_dict(checkpoint[MixedPrecision.__qualname__])

    def teardown(self) -> None:
        """Disconnects the mesh, whose process groups end with the run."""
        super().teardown()
        for step in reversed(self._float32_steps):
            step.close()
        self._float32_steps.clear()
        self._float8_layers.restore()
        self.mesh = self._norm = None
        self.around_clipping = nullcontext
        if self.scaler is not None:
            self.scaler.mesh, self.scaler.around_unscaling = None, nullcontext

    def __getstate__(self) -> dict[str, Any]:
        """Returns the number format and the loss scale, without process groups."""
        return {**vars(self), "mesh": None, "_norm": None, "_float32_steps": [], "_float8_layers": Float8Layers({})}

    @property
    def _is_mixed(self) -> bool:
        return self.precision in ("16-mixed", "bf16-mixed")
