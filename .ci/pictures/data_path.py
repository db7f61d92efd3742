"""The path of one batch: sampler, replicas, microbatches, stages, loss, and the average of the gradients."""

import torch
from canvas import BLUE, GREEN, GREY, INK, MUTED, ORANGE, RED, Canvas
from torch.utils.data import DistributedSampler

from lightning_hybrid.batch.split import split
from lightning_hybrid.layout import ParallelLayout

LAYOUT = ParallelLayout(pipeline_parallel_size=2, data_replicate_size=2)
BATCH, MICROBATCHES = 8, 4  # of each replica


def samples_of(replica: int) -> list[int]:
    """The samples that a replica draws, without shuffling."""
    size = LAYOUT.data_parallel_size
    sampler = DistributedSampler(range(BATCH * size), num_replicas=size, rank=replica, shuffle=False)
    return list(sampler)


def rank_at(stage: int, replica: int) -> int:
    """The rank of a stage of a replica."""
    ranks = range(LAYOUT.world_size)
    return next(r for r in ranks if LAYOUT.coordinates(r).pp == stage and LAYOUT.data_rank(r) == replica)


def draw() -> str:
    """The picture."""
    canvas = Canvas(530, "The path of one batch through replicas, microbatches and stages")
    words = f"One batch: 2 stages x 2 replicas, {MICROBATCHES} microbatches, batch_size={BATCH}"
    canvas.text(20, 32, words, size=17, font_weight=600)
    for x, words in ((20, "1 loader"), (150, "2 microbatches"), (330, "3 stages"), (598, "4 loss")):
        canvas.text(x, 62, words, fill=MUTED)
    for replica in range(LAYOUT.data_parallel_size):
        _replica(canvas, 74 + 216 * replica, replica)
    for stage in range(LAYOUT.pipeline_parallel_size):
        x = 372 + 140 * stage
        canvas.arrow((x, 244), (x, 218), colour=RED, width=2.5)
        canvas.arrow((x, 264), (x, 290), colour=RED, width=2.5)
    canvas.rect(320, 238, 246, 32, fill="#ffffff", stroke=RED, stroke_width=1.5)
    canvas.text(443, 259, "5 average of the gradients", anchor="middle")
    canvas.text(20, 259, "each replica has its own batch", fill=MUTED)
    canvas.line((30, 482), (58, 482), colour=BLUE, width=2)
    canvas.text(66, 487, "activations, per microbatch")
    canvas.line((290, 482), (318, 482), colour=ORANGE, width=2)
    canvas.text(326, 487, "their gradients, per microbatch")
    canvas.line((560, 482), (588, 482), colour=RED, width=2.5)
    canvas.text(596, 487, "once per step")
    canvas.text(20, 514, "6 The optimizer steps on the parameters of each rank's own stage.", fill=MUTED)
    return canvas.svg()


def _replica(canvas: Canvas, top: float, replica: int) -> None:
    samples = samples_of(replica)
    half = len(samples) // 2
    rows = (" ".join(map(str, part)) for part in (samples[:half], samples[half:]))
    canvas.box(20, top + 34, 104, 76, f"replica {replica}", *rows, colour=GREY)
    pieces, weights = split(torch.tensor(samples), MICROBATCHES)
    for i, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
        y = top + 4 + i * 36
        canvas.box(160, y, 118, 28, f"{i}: " + ", ".join(map(str, piece.tolist())), colour=GREEN)
        canvas.curve((124, top + 72), (158, y + 14), colour=INK)
        canvas.line((278, y + 14), (298, y + 14), (298, top + 72), colour=INK)
        if i == 0:
            words = f"weight {weight:g} each"
    canvas.text(160, top + 156, words, fill=MUTED)
    canvas.arrow((298, top + 72), (318, top + 72))
    for stage in range(LAYOUT.pipeline_parallel_size):
        words = (f"stage {stage}", f"rank {rank_at(stage, replica)}")
        canvas.box(320 + 140 * stage, top + 14, 104, 116, *words, colour=BLUE)
    canvas.box(594, top + 34, 106, 76, "weighted", "mean of the", "losses", colour=ORANGE)
    for x in (424, 564):
        width = 36 if x == 424 else 30
        canvas.arrow((x, top + 58), (x + width, top + 58), colour=BLUE, width=2)
        canvas.arrow((x + width, top + 88), (x, top + 88), colour=ORANGE, width=2)
