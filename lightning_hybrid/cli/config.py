"""What a LightningCLI config says of a run besides its classes: the layout, the seed, and arguments of the Trainer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_hybrid.cli.classes import section
from lightning_hybrid.cli.command import UsageError, usage_errors

if TYPE_CHECKING:
    from lightning_hybrid.verify import Layout

# Arguments of the Trainer that change the numbers of a step, and that a verification can take over.
_TAKEN = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "use_distributed_sampler")
# Others that the commands read, or choose themselves, or that change no numbers.
_IGNORED = ("strategy", "devices", "num_nodes", "accelerator", "precision", "default_root_dir")
_IGNORED_KINDS = ("enable_", "limit_", "log", "max_", "min_")


@dataclass(frozen=True)
class TrainerConfig:
    """The parts of a config that ``verify`` and ``explain`` use.

    Attributes:
        layout: The layout of its strategy; None if it names another strategy, or none.
        seed: Its ``seed_everything``, where that is a number.
        precision: Its precision; None if it names none.
        arguments: Arguments of the Trainer that are taken over.
        unused: Names of further arguments of the Trainer that it sets and that may change numbers.
    """

    layout: Layout | None = None
    seed: int | None = None
    precision: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


def trainer_config(cli: Any) -> TrainerConfig:
    """Read the config that a LightningCLI has parsed.

    Raises:
        UsageError: The layout does not have these sizes, or is that of a class derived from ``Hybrid3DStrategy``.
    """
    trainer = section(cli, "trainer").as_dict()
    defaults = inspect.signature(cli.trainer_class).parameters
    given = {name: value for name, value in trainer.items() if name in defaults and value != defaults[name].default}
    seed, precision = section(cli, "seed_everything"), given.get("precision")
    return TrainerConfig(
        layout=_layout(cli, given),
        seed=seed if isinstance(seed, int) and not isinstance(seed, bool) else None,
        precision=None if precision is None else str(precision),
        arguments={name: value for name, value in given.items() if name in _TAKEN},
        unused=tuple(n for n in given if n not in (*_TAKEN, *_IGNORED) and not n.startswith(_IGNORED_KINDS)),
    )


def _layout(cli: Any, given: Mapping[str, Any]) -> Layout | None:
    """Return the layout of the config's strategy and devices."""
    from lightning_hybrid.strategies.hybrid3d import OPTION_DEFAULTS
    from lightning_hybrid.strategies.options.foreign import refuse_foreign
    from lightning_hybrid.verify.layouts import layout_of_options

    options = _strategy_options(given.get("strategy"))
    if options is None:
        return None
    with usage_errors():
        refuse_foreign({name: options[name] for name in options if name not in OPTION_DEFAULTS}, OPTION_DEFAULTS)
        changed = {name: value for name, value in options.items() if value != OPTION_DEFAULTS[name]}
        return layout_of_options(changed, _num_devices(given))


def _strategy_options(strategy: Any) -> dict[str, Any] | None:
    """Return the options of a strategy of this package by its class path or registered name; None if it is another."""
    from lightning.pytorch.strategies import StrategyRegistry

    if isinstance(strategy, str):
        is_registered = strategy.startswith("hybrid3d") and strategy in StrategyRegistry
        return dict(StrategyRegistry[strategy]["init_params"]) if is_registered else None
    if not isinstance(strategy, Mapping):
        return None
    path = str(strategy.get("class_path"))
    if path.startswith("lightning_hybrid.") and path.endswith(".Hybrid3DStrategy"):
        return dict(strategy.get("init_args") or {})
    if path.startswith(("lightning.", "pytorch_lightning.")):
        return None
    raise UsageError(f"trainer.strategy: {path} is not lightning_hybrid.Hybrid3DStrategy; name a layout with --layout")


def _num_devices(given: Mapping[str, Any]) -> int | None:
    """Return the number of ranks that the config names; None if it depends on the machine."""
    devices = given.get("devices", "auto")
    if isinstance(devices, str) and devices.isdecimal():
        devices = int(devices)
    elif isinstance(devices, list):
        devices = len(devices)
    nodes = given.get("num_nodes", 1)
    return math.prod((devices, nodes)) if isinstance(devices, int) and devices > 0 else None
