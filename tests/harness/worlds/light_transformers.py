"""Imports models of transformers without torchao, whose import initializes CUDA where there is a device.

Ranks are forked from the process that loads this, and cannot use CUDA if that process has initialized it.
"""

import contextlib
import importlib
import sys

assert "torchao" not in sys.modules
sys.modules["torchao"] = None  # its import fails, and find_spec finds none
try:
    for name in ("gpt2", "llama", "t5"):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"transformers.models.{name}.modeling_{name}")
finally:
    del sys.modules["torchao"]
