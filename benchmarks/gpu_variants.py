"""The models that `gpu.py` trains, and how: its variants, those of its first call, of its second, and the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    """A model and its batch."""

    layers: int
    width: int
    heads: int
    batch: int
    precision: str
    length: int = 1024
    vocabulary: int = 50304


# What a layer computes per byte that it saves grows with its width: from some width on, copies hide behind products.
WIDTHS = {
    "w4096": Size(layers=6, width=4096, heads=32, batch=8, precision="bf16-true"),
    "w8192": Size(layers=3, width=8192, heads=64, batch=4, precision="bf16-true"),
    "w16384": Size(layers=2, width=16384, heads=128, batch=4, precision="bf16-true"),
}
SIZES = {
    "125M": Size(layers=12, width=768, heads=12, batch=16, precision="bf16-mixed"),
    "1.3B": Size(layers=24, width=2048, heads=16, batch=8, precision="bf16-true"),
    **WIDTHS,
}
TINY = {
    "125M": Size(layers=4, width=64, heads=2, batch=4, precision="bf16-mixed", length=64, vocabulary=256),
    "1.3B": Size(layers=6, width=96, heads=2, batch=4, precision="bf16-true", length=64, vocabulary=256),
    **{name: Size(1, 64, 2, 4, "bf16-true", length=64, vocabulary=256) for name in WIDTHS},
}


@dataclass(frozen=True)
class Variant:
    """A model and how it is trained; ``options`` are the strategy's, None for a plain Trainer."""

    size: str
    name: str
    options: dict[str, Any] | None = field(default_factory=dict)
    callback: str = ""  # a class of `lightning_hybrid.callbacks`
    precision: dict[str, Any] = field(default_factory=dict)  # arguments of `HybridPrecision`
    optimizer: str = "torch.optim.AdamW"

    @property
    def title(self) -> str:
        return f"{self.size} {self.name}"


HOST = {"optimizer_states": "cpu"}
FIRST = [
    Variant("125M", "plain", None),
    Variant("125M", "none"),
    Variant("125M", "full", {"recompute": "full"}),
    Variant("125M", "selective", {"recompute": "selective"}),
    Variant("125M", "budget", {"recompute": "budget"}),
    Variant("1.3B", "none"),
    Variant("1.3B", "full", {"recompute": "full"}),
    Variant("1.3B", "selective", {"recompute": "selective"}),
    Variant("125M", "compile", {"compile": "units"}),
    Variant("125M", "host-states", {"offload": HOST}),
    Variant("125M", "host-states-in-backward", {"offload": HOST, "optimizer_in_backward": True}),
    Variant("125M", "in-backward", {"optimizer_in_backward": True}),
    Variant("125M", "chunked-loss", {"chunked_loss": True}),
    Variant("125M", "compile-selective", {"compile": "units", "recompute": "selective"}),
    Variant("1.3B", "float8-compile", {"compile": "units"}, precision={"float8": True}),
]
SECOND = [
    Variant("1.3B", "none"),
    Variant("1.3B", "float8-selective", {"compile": "units", "recompute": "selective"}, precision={"float8": True}),
    *(
        Variant(size, name, callback=callback)
        for size in WIDTHS
        for name, callback in (("none", ""), ("host-activations", "ActivationOffload"))
    ),
]
OTHERS = [
    Variant("125M", "host-activations", callback="ActivationOffload"),
    Variant("125M", "chunked-loss-8", {"chunked_loss": 8}),
    Variant("1.3B", "host-states", {"offload": HOST}),
    Variant("1.3B", "host-activations", callback="ActivationOffload"),
    Variant("1.3B", "chunked-loss", {"chunked_loss": True}),
    Variant("1.3B", "compile", {"compile": "units"}),
    Variant("1.3B", "float8", precision={"float8": True}),
    Variant("1.3B", "master-weights", precision={"master_weights": True}),
    Variant("1.3B", "stochastic-rounding", precision={"stochastic_rounding": True}),
    Variant("1.3B", "adamw-8bit", optimizer="torchao.optim.AdamW8bit"),
    Variant("1.3B", "adamw-4bit", optimizer="torchao.optim.AdamW4bit"),
]
BY_TITLE = {variant.title: variant for variant in (*FIRST, *SECOND, *OTHERS)}
