"""Which line of whose code an operation comes from."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import lightning
import torch

import lightning_hybrid
from lightning_hybrid import host_copies
from lightning_hybrid.params import guards
from lightning_hybrid.step.tracing import functions

_PACKAGE = str(Path(lightning_hybrid.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_OPTIMIZERS = str(Path(torch.__file__).parent / "optim" / "optimizer.py")
_DISTRIBUTED = str(Path(torch.__file__).parent / "distributed")
_LIGHTNING = str(Path(lightning.__file__).parent)
# Process groups of the harness and wrappers of recordings pass on what was called, and the host reads for others.
_PASSING = str(host_copies.__file__), str(functions.__file__), str(guards.__file__)
_HERE = str(Path(__file__).parent), str(Path(__file__).parents[1] / "python_group.py"), *_PASSING
_MODES = ("__torch_function__", "__torch_dispatch__", "event")
_STANDARD = str(Path(ast.__file__).parent)


class Place(NamedTuple):
    """A line of code.

    Attributes:
        owner: "package", "lightning", "user", or "torch" where nothing else called.
        line: Such as ``zero/rounds.py:104 _run_round``.
        statement: Its text, of the package only.
        in_distributed: Whether torch.distributed itself did it for that line.
        in_optimizer: Whether an optimizer of torch did, which reads counts of steps: those are on the host.
    """

    owner: str
    line: str
    statement: str
    in_distributed: bool = False
    in_optimizer: bool = False


def place() -> Place:
    """The innermost frame that belongs neither to torch nor to the recorder."""
    frame: FrameType | None = sys._getframe(1)
    in_distributed = in_optimizer = False
    while frame is not None:
        path = frame.f_code.co_filename
        # A mode only passes on what was called.
        if not path.startswith((*_HERE, "<")) and frame.f_code.co_name not in _MODES:
            owner = _owner(path)
            if owner not in ("torch", "standard"):
                found = _at(path, frame.f_lineno, frame.f_code.co_name, owner)
                return found._replace(in_distributed=in_distributed, in_optimizer=in_optimizer)
            in_distributed |= path.startswith(_DISTRIBUTED)
            in_optimizer |= path == _OPTIMIZERS and frame.f_code.co_name == "_get_value"
        frame = frame.f_back
    return Place("torch", "torch", "", in_distributed)


@cache
def _owner(path: str) -> str:
    for owner, root in (("package", _PACKAGE), ("torch", _TORCH), ("lightning", _LIGHTNING)):
        if path.startswith(root + "/"):
            return owner
    return "standard" if path.startswith(_STANDARD + "/") and "-packages" not in path else "user"


@cache
def _at(path: str, number: int, function: str, owner: str) -> Place:
    if owner == "user":
        return Place(owner, "user", "")
    root = _PACKAGE if owner == "package" else str(Path(_LIGHTNING).parent)
    line = f"{Path(path).relative_to(root).as_posix()}:{number} {function}"
    return Place(owner, line, _statements(path).get(number, "") if owner == "package" else "")


@cache
def _statements(path: str) -> dict[int, str]:
    """The text of the innermost statement at each line."""
    source = Path(path).read_text()
    rows = source.splitlines()
    found: dict[int, str] = {}
    for node in ast.walk(ast.parse(source)):  # outer ones first
        if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.ClassDef):
            assert node.end_lineno is not None
            text = "\n".join(rows[node.lineno - 1 : node.end_lineno])
            found.update((number, text) for number in range(node.lineno, node.end_lineno + 1))
    return found
