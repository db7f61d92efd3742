"""Models by name, each with samples that are a function of their index.

`CASES[name]` makes the module; `samples(name, indices)` makes the batch of these samples. All of them are float64.
"""

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from models.containers import Containers, ReturnsInputs
from models.hand_written import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Attention,
    AuxiliaryLosses,
    BatchNorms,
    Branches,
    Dropouts,
    Encoder,
    EncoderDecoder,
    GlueParameters,
    InPlace,
    LateReaders,
    Layers,
    Lit,
    Masks,
    Recurrent,
    SeveralForwards,
    Tied,
    UNet,
)
from models.hugging_face import GPT2, T5, Bert, GPT2Dropout, Llama, ViT

HAND_WRITTEN = [
    SeveralForwards, EncoderDecoder, UNet, Branches, GlueParameters, LateReaders, AuxiliaryLosses, Tied, InPlace,
    ReturnsInputs, Containers, Masks, BatchNorms, Recurrent, Attention, Encoder,
]  # fmt: skip
HUGGING_FACE = [GPT2, Llama, T5, Bert, ViT]
CASES = {case.__name__: case for case in [Layers, Dropouts, *HAND_WRITTEN, *HUGGING_FACE, GPT2Dropout]}


def make(case, dtype: torch.dtype = torch.float64) -> Lit:
    """The module of a case (or of its name), the same every time."""
    case = CASES[case] if isinstance(case, str) else case
    torch.manual_seed(0)
    return case().to(dtype)


# --- samples ---------------------------------------------------------------------------------------------------------


def sample(kind: str, index: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """One sample, a function of its index only."""
    draw = torch.Generator().manual_seed(1000 + index)
    if kind == "tokens":
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=draw)
        return {"input_ids": ids, "labels": torch.randint(1, VOCABULARY, (LENGTH,), generator=draw)}
    if kind == "images":
        pixels = torch.randn(3, 8, 8, generator=draw, dtype=torch.float64).to(dtype)
        return {"pixel_values": pixels, "labels": torch.tensor(index % 4)}
    x, y = torch.randn(2, WIDTH, generator=draw, dtype=torch.float64).to(dtype)
    return {"x": x * (1 + index % 3), "y": y, "label": torch.tensor(index % 4), "mask": torch.tensor(index % 3 != 1)}


class Samples(Dataset):
    """The first samples of a kind."""

    def __init__(self, kind: str, count: int, dtype: torch.dtype = torch.float64):
        self.kind, self.count, self.dtype = kind, count, dtype

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return sample(self.kind, index, self.dtype)


def batch_of(kind: str, indices, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return default_collate([sample(kind, index, dtype) for index in indices])
