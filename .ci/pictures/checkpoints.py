"""A checkpoint saved under one layout and loaded under others: which file each rank's box of a tensor comes from."""

import torch
from canvas import GREY, INK, MUTED, RANKS, SMALL, Canvas, tint

from lightning_hybrid.params.placement import Shard
from lightning_hybrid.zero.ranks import shard_placement

SHAPE, SIDE = torch.Size((12, 12)), 60  # of each tensor, and of its picture
WRITERS = ((0, 1), (2, 3))  # the ranks of each stage; file r is written by rank r
UNIT = SIDE / SHAPE[0]


def draw() -> str:
    """The picture."""
    canvas = Canvas(454, "A checkpoint of four ranks, loaded under other layouts")
    for x, words in ((20, "saved by 4 ranks"), (262, "model.ckpt/"), (482, "loaded by any layout")):
        canvas.text(x, 34, words, size=16, font_weight=600)
    canvas.text(20, 58, "2 stages x 2 replicas, ZeRO-3", fill=MUTED)
    canvas.text(482, 58, "layers.0.weight on each rank", fill=MUTED)
    rows = shard_placement(SHAPE, len(WRITERS[0]))
    for tensor, ranks in enumerate(WRITERS):
        for index, rank in enumerate(ranks):
            x, y = 44 + 100 * index, 150 + 150 * tensor
            canvas.text(x, y - 10, f"rank {rank}")
            _tensor(canvas, x, y, tensor, [(rows, index, len(ranks))])
        canvas.text(20, 150 + 150 * tensor - 30, f"stage {tensor}: layers.{tensor}.weight", size=SMALL, font_weight=600)
    for i, name in enumerate(("manifest.json", "meta.pt", ".metadata", *(f"__{rank}_0.distcp" for rank in range(4)))):
        y, file = 62 + 40 * i, i - 3
        colour = RANKS[file] if file >= 0 else GREY
        canvas.box(262, y, 150, 30, name, colour=colour)
    canvas.text(262, 372, "or one file,", fill=MUTED)
    canvas.text(262, 390, "gathered by rank 0:", fill=MUTED)
    canvas.box(262, 400, 150, 30, "model.ckpt", colour=GREY)
    canvas.arrow((216, 220), (254, 220), width=3)
    canvas.arrow((420, 220), (464, 220), width=3)
    layouts = (
        ("one process", None, 1),
        ("tensor_parallel_size=2", Shard.evenly(1, SHAPE[1], 2), 2),
        ("3 replicas, zero_stage=3", shard_placement(SHAPE, 3), 3),
    )
    for i, (words, placement, size) in enumerate(layouts):
        y = 76 + 126 * i
        canvas.text(482, y + 14, words)
        for rank in range(size):
            x = 482 + 78 * rank
            _tensor(canvas, x, y + 42, 0, [(placement, rank, size)])
            canvas.text(x, y + 36, f"rank {rank}", fill=MUTED)
    return canvas.svg()


def _tensor(canvas: Canvas, x: float, y: float, tensor: int, held: list[tuple[Shard | None, int, int]]) -> None:
    """A tensor as a square; the boxes that a rank holds are in the colours of the files that contain them."""
    canvas.rect(x, y, SIDE, SIDE, rx=0, fill=tint(INK, 0.04), stroke=tint(INK, 0.3), stroke_dasharray="3 2")
    for placement, rank, size in held:
        for index, file in enumerate(WRITERS[tensor]):
            [(start, length)] = shard_placement(SHAPE, len(WRITERS[tensor])).ranges(index, len(WRITERS[tensor]))
            box = [(start, start + length), (0, SHAPE[1])]
            if placement is not None:
                [(begin, width)] = placement.ranges(rank, size)
                low, high = box[placement.dim]
                box[placement.dim] = (max(low, begin), min(high, begin + width))
            (top, bottom), (left, right) = box
            if top < bottom and left < right:
                place = (x + left * UNIT, y + top * UNIT, (right - left) * UNIT, (bottom - top) * UNIT)
                canvas.rect(*place, rx=0, fill=RANKS[file], stroke=INK, stroke_width=1)
