"""Experts over two ranks: rows of tokens are dispatched to the ranks of their experts, and combined on their own."""

import torch
from canvas import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, RULE, Canvas, tint

from lightning_hybrid.experts.moe.dispatch import dispatch_all_pairs

EXPERTS = 4
CHOICES = ([[0, 2], [1, 0], [2, 3]], [[0, 3], [1, 2], [3, 1]])  # of each rank: the two experts of each token
NAMES = (("a", "b", "c"), ("d", "e", "f"))
COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
SIDE, STEP, RANK = 24, 27, 206  # of a row; from one rank to the next


def rows_of(rank: int) -> list[tuple[int, int]]:
    """Token and expert of each row of a rank, sorted by expert."""
    experts = torch.tensor(CHOICES[rank])
    counts = torch.bincount(experts.flatten(), minlength=EXPERTS)
    found = dispatch_all_pairs(experts, torch.full(experts.shape, 0.5), counts)
    sorted_experts = torch.arange(EXPERTS).repeat_interleave(found.counts)
    return list(zip(found.tokens.tolist(), sorted_experts.tolist(), strict=True))


def arrivals() -> dict[tuple[int, int, int], tuple[int, int]]:
    """Of each row (rank, token, expert): the rank of its expert, and its place there."""
    found, each = {}, EXPERTS // len(CHOICES)
    for owner in range(len(CHOICES)):
        order = [
            (rank, token, expert)
            for expert in range(owner * each, (owner + 1) * each)
            for rank in range(len(CHOICES))
            for token, chosen in rows_of(rank)
            if chosen == expert
        ]
        found |= {row: (owner, place) for place, row in enumerate(order)}
    return found


def y_of(rank: int, place: float) -> float:
    """Top of a row."""
    return 92 + rank * RANK + place * STEP


def draw() -> str:
    """The picture."""
    canvas = Canvas(508, "Expert parallelism over two ranks")
    canvas.text(
        20, 32, "expert_parallel_size=2: 4 experts on 2 ranks, 2 experts for each token", size=17, font_weight=600
    )
    columns = ((20, "tokens"), (126, "rows, by expert"), (330, "experts"), (490, "results"), (640, "tokens"))
    for x, words in columns:
        canvas.text(x, 66, words, fill=MUTED)
    canvas.line((14, 285), (706, 285), colour=RULE, stroke_dasharray="5 4")
    for rank in range(len(CHOICES)):
        canvas.text(20, y_of(rank, 0) + 4, f"rank {rank}", font_weight=600)
        _tokens(canvas, rank)
    for (rank, token, expert), (owner, place) in arrivals().items():
        source = rows_of(rank).index((token, expert))
        colour, name = COLOURS[expert], NAMES[rank][token]
        y, to_y = y_of(rank, source), y_of(owner, place)
        canvas.curve((180, y + SIDE / 2), (326, to_y + SIDE / 2), colour=colour, width=2)
        canvas.curve((392, to_y + SIDE / 2), (504, y + SIDE / 2), colour=colour, width=2)
        canvas.box(150, y, 30, SIDE, name, colour=colour)
        canvas.box(328, to_y, 30, SIDE, name, colour=colour)
        canvas.rect(362, to_y, 28, SIDE, fill=colour)
        canvas.text(376, to_y + 17, f"E{expert}", anchor="middle", fill="#ffffff" if expert in (0, 2) else INK)
        canvas.box(506, y, 30, SIDE, name, colour=colour)
    for x in (254, 450):
        canvas.text(x, 474, "all-to-all", anchor="middle", font_weight=600)
    words = "A row: the activation of a token, for one of its experts. A token: the weighted sum of its results."
    canvas.text(20, 496, words, fill=MUTED)
    return canvas.svg()


def _tokens(canvas: Canvas, rank: int) -> None:
    for token, name in enumerate(NAMES[rank]):
        y = y_of(rank, 0.9 + 1.9 * token)
        canvas.rect(20, y, 40, SIDE, fill=tint(INK, 0.08), stroke=INK)
        canvas.text(40, y + 17, name, anchor="middle")
        canvas.rect(650, y, 40, SIDE, fill=tint(INK, 0.08), stroke=INK)
        canvas.text(670, y + 17, name, anchor="middle")
        for place, (other, _) in enumerate(rows_of(rank)):
            if other == token:
                canvas.line((60, y + SIDE / 2), (150, y_of(rank, place) + SIDE / 2), colour=MUTED, width=1)
                canvas.line((536, y_of(rank, place) + SIDE / 2), (650, y + SIDE / 2), colour=MUTED, width=1)
