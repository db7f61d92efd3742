"""Guessed reads: answers for code that reads a value of the model in a recording that is not replayed.

A step that branches on such values is recorded several times with different answers, so that its branches are visited.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The answers that each recording gives, in turn.
GUESSES = ((True,), (False,), (True, False), (False, True))
# Floats read from the model: one small and one large, so that a comparison with a threshold goes either way.
_FLOATS = {True: 0.5, False: 1e4}


def answer_guessed_read(name: str, absent: Tensor, guess: bool) -> Any:
    """The guessed result of a read of an absent tensor: a number or a truth value, or an array of its shape.

    Args:
        name: Name of the method, such as "item" or "__bool__".
        absent: The tensor, of any shape.
        guess: Selects one of two answers.
    """
    number = _guessed_number(absent.dtype, guess)
    if name in ("item", "__complex__"):
        return number
    if name == "__float__":
        return float(number.real)
    if name in ("__int__", "__index__"):
        return int(guess)
    if name in ("tolist", "numpy", "__array__", "__dlpack__"):
        with torch._C.DisableTorchFunction():
            content = torch.full(tuple(absent.shape), number, dtype=absent.dtype)
        if name == "tolist":
            return content.tolist()
        content = content.float() if content.dtype is torch.bfloat16 else content  # NumPy has no equivalent dtype
        return content.__dlpack__() if name == "__dlpack__" else content.numpy()
    if name in ("__repr__", "__str__", "__format__"):
        return str(number)
    return guess


def _guessed_number(dtype: torch.dtype, guess: bool) -> Any:
    if dtype is torch.bool:
        return guess
    if dtype.is_complex:
        return complex(_FLOATS[guess])
    return _FLOATS[guess] if dtype.is_floating_point else int(guess)
