"""The values of a checkpoint file: parameters, buffers, states and groups of optimizers, schedulers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.checkpoint.convert import to_file
from lightning_hybrid.checkpoint.folder import is_folder


def saved_values(path: str, module: nn.Module, optimizers: list[Any]) -> dict[str, Tensor]:
    """Tensors and numbers of a checkpoint, of any shapes, by what they are.

    Args:
        path: The file, or the folder of a distributed checkpoint.
        module: The module that was saved, whose FQNs name the states of its parameters.
        optimizers: Those that were saved.
    """
    if is_folder(path):
        to_file(Path(path), Path(f"{path}.one"), weights_only=False)
        path = f"{path}.one"
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    values = dict(_named(checkpoint["state_dict"], ""))
    for number, state in enumerate(checkpoint.get("optimizer_states", ())):
        prefix = f"optimizer {number}: "
        own = [p for group in getattr(optimizers[number], "param_groups", ()) for p in group["params"]]
        for index, entries in state.get("state", {}).items():
            known = isinstance(index, int) and index < len(own)
            values.update(_named(entries, prefix, of=names.get(id(own[index])) if known else f"parameter {index}"))
        for index, group in enumerate(state.get("param_groups", ())):
            counted = {**group, "number of parameters": len(group["params"])}
            del counted["params"]
            values.update(_named(counted, prefix, of=f"group {index}"))
    for number, state in enumerate(checkpoint.get("lr_schedulers", ())):
        values.update(_named(state, f"scheduler {number}: "))
    return values


def _named(tree: Any, prefix: str, of: str | None = "") -> Iterator[tuple[str, Tensor]]:
    if not isinstance(tree, Mapping):
        return
    for path, leaf in torch.utils._pytree.tree_flatten_with_path(dict(tree))[0]:
        if isinstance(leaf, Tensor | float | int):
            key = ".".join(str(getattr(part, "key", getattr(part, "idx", part))) for part in path)
            yield f"{prefix}{key}{f' of {of}' if of != '' else ''}", torch.as_tensor(leaf).detach()
