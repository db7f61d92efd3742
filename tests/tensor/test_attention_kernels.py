"""Ranks attend by the kernel of one process: flash attention where it is eligible, with the same flags and no mask."""

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.fits import Run, fit, fit_reference
from models.wide import EncoderWide, GPT2OneHead, GPT2Wide, LlamaWide, ViTWide

FLASH = "_scaled_dot_product_flash_attention_for_cpu"


class EncoderCausal(EncoderWide):
    """torch drops a causal mask for a flag; each row attends to something."""

    def loss(self, batch):
        x = self.embedding(batch["input_ids"])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        x = self.encoder(x, mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


class EncoderCausalOneHead(EncoderCausal):
    heads = 1


class LlamaPadded(LlamaWide):
    """transformers drop a padding mask that is all ones, by a read of its values."""

    def loss(self, batch):
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["labels"] > 0).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


class Kernels(TorchDispatchMode):
    """The kernels of attention that run inside; a softmax is one of written-out attention."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._opname
        if "attention" in name or name in ("_softmax", "_safe_softmax"):
            given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
            query, mask = given.get("query", args[0]), given.get("attn_mask")
            flags = given.get("dropout_p", 0.0), given.get("is_causal", False), given.get("scale")
            self.found.add((name, query.dtype, query.shape[-1], flags, None if mask is None else mask.dtype))
        return func(*args, **kwargs)


class Watch(Callback):
    """Records the kernels of the second batch."""

    recorded = frozenset()

    def on_train_batch_start(self, trainer, module, batch, index):
        self.mode = Kernels()
        self.mode.__enter__()

    def on_train_batch_end(self, *_):
        self.mode.__exit__(None, None, None)
        self.recorded = self.mode.found


def kernels(worlds, run, how=fit):
    return set().union(*(rank.extra for rank in worlds.run(run.world_size, how, run)))


def of(case, precision="bf16-mixed", **sizes):
    return Run(case, dtype=torch.float32, callback=Watch, trainer={"precision": precision}, **sizes)


def slow(*rows):
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


TP2, SP, CP2, PP2 = {"tp": 2}, {"tp": 2, "sequence": True}, {"cp": 2}, {"pp": 2}
FULL, SELECTIVE = ({**TP2, "strategy": {"recompute": how}} for how in ("full", "selective"))


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (GPT2Wide, TP2),
        (EncoderWide, TP2),
        (EncoderCausal, SP),
        (EncoderCausal, CP2),
        (LlamaPadded, PP2),
        *slow((EncoderCausal, TP2), (EncoderCausal, FULL), (EncoderWide, SELECTIVE), (EncoderWide, CP2)),
        *slow(*((GPT2Wide, sizes) for sizes in (SP, CP2, PP2, FULL, SELECTIVE))),
        *slow(*((LlamaPadded, sizes) for sizes in (TP2, SP, CP2, FULL)), (ViTWide, SP), (ViTWide, CP2)),
        *slow((LlamaWide, {**TP2, "pp": 2}), (LlamaWide, {**TP2, "cp": 2}), (EncoderCausal, {**TP2, "cp": 2})),
    ],
)
def test_kernels_are_those_of_one_process(worlds, case, sizes):
    wanted = kernels(worlds, of(case), fit_reference)
    assert {row[0] for row in wanted} == {FLASH, f"{FLASH}_backward"}
    assert kernels(worlds, of(case, **sizes)) == wanted


@pytest.mark.parametrize("case", [EncoderCausalOneHead, pytest.param(GPT2OneHead, marks=pytest.mark.slow)])
def test_a_ring_attends_to_each_block_by_flash_attention(worlds, case):
    def but_causal(rows):  # later positions attend to whole blocks of earlier ones
        return {(name, dtype, features, mask) for name, dtype, features, _, mask in rows}

    found, wanted = kernels(worlds, of(case, cp=2)), kernels(worlds, of(case), fit_reference)
    assert but_causal(found) == but_causal(wanted) == {(*row, None) for *row, _ in but_causal(wanted)}
    assert {row[0] for row in wanted} == {FLASH, f"{FLASH}_backward"}
