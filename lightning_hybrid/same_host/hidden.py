"""What ranks do with the memory that they share is nothing of the step's: no mode sees it.

    with no_dispatch_mode(), no_function_mode():
        ...

Activation checkpointing would note these operations as if they could be repeated: they read memory that other ranks
write to. Torch's own guards, since a context of Python costs more than a small message does.
"""

from torch._C import DisableTorchFunction as no_function_mode
from torch._C import _DisableTorchDispatch as no_dispatch_mode

__all__ = ["no_dispatch_mode", "no_function_mode"]
