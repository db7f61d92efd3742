"""Errors of config files and command lines of LightningCLI: which option of the strategy was meant.

jsonargparse checks a config by the strategy's signature, before the strategy is made, and names no other options.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any

from lightning_hybrid.namespace import extend
from lightning_hybrid.strategies.options.foreign import refuse_foreign

_UNKNOWN = re.compile(r"Option '(\w+)' is not accepted")
_NAME_ALONE = re.compile(r"dot import path string: (hybrid3d\w*|auto)")
_OPTION = re.compile(r"NestedArg\(key='(\w+)', val='?([^')]*)'?\)")


def hint_at_options(library: Any) -> None:
    """Let errors of jsonargparse end with the nearest options."""
    extend(library.ArgumentParser, "error", _with_hint)


def _with_hint(error: Callable[..., Any], parser: Any, message: str, *further: Any, **options: Any) -> Any:
    return error(parser, f"{message}{hint(message)}", *further, **options)


def hint(message: str) -> str:
    """Return the line that follows an error of a config on the strategy; "" if it is on something else."""
    from lightning_hybrid.strategies.options.options import Options  # late: it imports torch

    if name := _NAME_ALONE.search(message):
        option = _OPTION.search(message)
        key, value = option.groups() if option else ("", "")
        near = difflib.get_close_matches(key, Options.names(), n=1)
        if name[1] == "auto" and not near:
            return ""
        flag = f" --trainer.strategy.{near[0] if near else key} {value}" if option else ", class_path in a config"
        return (
            f"\n{name[1]!r} is a name without options; name the class: --trainer.strategy"
            f" lightning_hybrid.Hybrid3DStrategy{flag}"
        )
    if "Hybrid3DStrategy" in message and (unknown := _UNKNOWN.search(message)):
        try:
            refuse_foreign({unknown[1]: "..."}, Options.names())
        except (TypeError, ValueError) as error:
            return f"\n{error}"
    return ""
