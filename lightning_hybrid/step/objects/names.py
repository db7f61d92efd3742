"""Names of torch's functions in the sets that several rooms use, and the folders whose code is not the user's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch


def names(text: str) -> frozenset[str]:
    """Return the names in a text."""
    return frozenset(text.split())


def operator_names(operations: Iterable[str]) -> frozenset[str]:
    """Return the functions of binary operations, and their methods: in place, of operators, reflected, augmented."""
    forms = ("", ""), ("", "_"), ("__", "__"), ("__r", "__"), ("__i", "__")
    return frozenset(f"{before}{name}{after}" for name in operations for before, after in forms)


CASTS = names("to float double half bfloat16 contiguous clone detach")  # of dtype, memory or graph alone
# Reads of content, by what they return.
NUMBER_READS = names("item __float__ __complex__")
TEXT_READS = names("__repr__ __str__ __format__")
BRANCH_READS = names("__bool__ __int__ __index__ __contains__ is_nonzero equal allclose")
CONTENT_READS = names("tolist numpy __array__ __dlpack__")
READS = NUMBER_READS | TEXT_READS | BRANCH_READS | CONTENT_READS
# Operations whose result has a shape that depends on content.
SIZED_BY_DATA = names("nonzero masked_select unique unique_consecutive argwhere bincount repeat_interleave")
# Methods and properties that need no content.
METADATA = names(
    "shape dtype device layout ndim requires_grad itemsize names _version is_cuda is_cpu is_meta is_mps is_xpu"
    " is_sparse is_quantized is_nested is_mkldnn size dim ndimension numel nelement __len__ element_size get_device"
    " is_floating_point is_complex is_contiguous stride"
)


PACKAGE = str(Path(__file__).parents[2])
TENSOR = str(Path(PACKAGE, "tensor"))
TORCH = str(Path(torch.__file__).parent)
EXPERT_RANKS = str(Path(PACKAGE, "experts", "parallel"))
