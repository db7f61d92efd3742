"""Memory of a rank between two steps under each ZeRO stage: the shards of every parameter of a model, counted."""

import math
from collections.abc import Iterator

import torch
from canvas import BLUE, GREEN, INK, MUTED, ORANGE, PAPER, RULE, WIDTH, Canvas, tint

from lightning_hybrid.zero.ranks import shard_placement

REPLICAS = 8
BYTES = {"parameters": 4, "gradients": 4, "optimizer states": 8}  # per element: 32 bits, and Adam has two states
FILL = {"parameters": BLUE, "gradients": ORANGE, "optimizer states": GREEN}
LEFT, BAR, STEP = 24, 26, 64


def shapes() -> Iterator[tuple[int, ...]]:
    """The parameters of a decoder of 32 layers of width 4096 (Touvron et al. 2023, table 2, the smallest)."""
    yield from ((32000, 4096), (32000, 4096), (4096,))
    for _ in range(32):
        yield from [(4096, 4096)] * 4 + [(11008, 4096), (11008, 4096), (4096, 11008), (4096,), (4096,)]


def elements(size: int) -> int:
    """Elements of all parameters on the first of some ranks that shard them."""
    total = 0
    for shape in map(torch.Size, shapes()):
        placement = shard_placement(shape, size)
        if placement is not None:
            [(_, length)] = placement.ranges(0, size)
            shape = (*shape[: placement.dim], length, *shape[placement.dim + 1 :])
        total += math.prod(shape)
    return total


def gigabytes(sharded: tuple[str, ...]) -> dict[str, float]:
    """Of a rank, by what is stored, if some of it is sharded over replicas."""
    return {name: elements(REPLICAS if name in sharded else 1) * count / 1e9 for name, count in BYTES.items()}


def draw() -> str:
    """A bar for each ZeRO stage; what is offloaded is light."""
    everything = tuple(BYTES)
    states = ("optimizer states",)
    rows = (
        ("zero_stage=0: replicas", gigabytes(()), ()),
        ("zero_stage=1 and 2", gigabytes(("gradients", *states)), ()),
        ("zero_stage=3", gigabytes(everything), ()),
        ('zero_stage=1, offload="disk:PATH"', gigabytes(("gradients", *states)), states),
        ('zero_stage=3, offload="disk:PATH"', gigabytes(everything), states),
        ("zero_stage=3, parameters and optimizer states offloaded", gigabytes(everything), ("parameters", *states)),
    )
    most = max(sum(sizes.values()) for _, sizes, _ in rows)
    scale = (WIDTH - LEFT - 130) / most
    canvas = Canvas(108 + STEP * len(rows) + 12, "Memory of a rank between two steps, by ZeRO stage")
    title = f"Memory of each of {REPLICAS} ranks between two steps, {elements(1) / 1e9:.2f} billion parameters"
    canvas.text(LEFT, 32, title, size=16, font_weight=600)
    canvas.text(LEFT, 54, "32 bits, Adam; activations come on top", fill=MUTED)
    x = LEFT
    for name, width in zip(BYTES, (120, 110, 160), strict=True):
        canvas.key(x, 82, [(FILL[name], name)], 0)
        x += width
    canvas.rect(x, 71, 13, 13, rx=2, fill=tint(MUTED, 0.2), stroke=MUTED, stroke_dasharray="3 2")
    canvas.text(x + 19, 82, "in a file, not in memory")
    for i, (words, sizes, offloaded) in enumerate(rows):
        y, x = 100 + STEP * i, float(LEFT)
        canvas.text(LEFT, y + 18, words, font_weight=600)
        for name, size in sizes.items():
            width = size * scale
            if name in offloaded:
                style = {"fill": tint(FILL[name], 0.25), "stroke": FILL[name], "stroke_dasharray": "4 3"}
            else:
                style = {"fill": FILL[name], "stroke": PAPER}
            canvas.rect(x, y + 26, width, BAR, rx=2, **style)
            if width > 50:
                fill = PAPER if name != "gradients" and name not in offloaded else INK
                canvas.text(x + width / 2, y + 44, f"{size:.1f}", anchor="middle", fill=fill)
            x += width
        in_memory = sum(size for name, size in sizes.items() if name not in offloaded)
        canvas.text(x + 8, y + 44, f"{in_memory:.1f} GB", font_weight=600)
        if offloaded:
            canvas.text(x + 82, y + 44, f"and {sum(sizes.values()) - in_memory:.1f} GB in a file", fill=MUTED)
    canvas.line((LEFT, 122), (LEFT, 108 + STEP * len(rows)), colour=RULE, width=1)
    return canvas.svg()
