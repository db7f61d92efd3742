"""The mesh of 2 stages x 2 replicas x 2 tensor ranks: rank numbers, and which ranks are neighbours on an axis."""

from canvas import BLUE, GREEN, INK, MUTED, ORANGE, RED, SMALL, Canvas, tint

from lightning_hybrid.layout import ParallelLayout

LAYOUT = ParallelLayout(pipeline_parallel_size=2, data_replicate_size=2, tensor_parallel_size=2)
SIDE = 58  # of the square of a rank


def groups_along(axis: str) -> list[list[int]]:
    """Ranks that differ in one coordinate only, group by group."""
    found: dict[tuple, list[int]] = {}
    for rank in range(LAYOUT.world_size):
        others = vars(LAYOUT.coordinates(rank)) | {axis: None}
        found.setdefault(tuple(others.values()), []).append(rank)
    return list(found.values())


def centre(rank: int) -> tuple[float, float]:
    """Of the square of a rank: stages from left to right, replicas from top to bottom."""
    place = LAYOUT.coordinates(rank)
    return 120 + place.pp * 350 + place.tp * 130, 118 + place.dp_replicate * 110


def draw() -> str:
    """The picture."""
    canvas = Canvas(396, "Ranks of pipeline_parallel_size=2, data_parallel_size=2, tensor_parallel_size=2")
    canvas.text(24, 32, "8 ranks = 2 stages x 2 replicas x 2 tensor ranks", size=17, font_weight=600)
    for stage in range(LAYOUT.pipeline_parallel_size):
        x = 66 + stage * 350
        canvas.rect(x, 56, 238, 226, rx=8, fill=tint(INK, 0.04), stroke=tint(INK, 0.5))
        ranks = [rank for rank in range(LAYOUT.world_size) if LAYOUT.coordinates(rank).pp == stage]
        words = f"stage {stage} · ranks {ranks[0]}-{ranks[-1]}"
        canvas.text(x + 119, 76, words, anchor="middle", fill=MUTED)
    for ranks in groups_along("pp"):
        (x, y), (to_x, _) = centre(ranks[0]), centre(ranks[1])
        # The two tensor ranks of a replica have a line each, one above and one below the squares' middle.
        tensor = LAYOUT.coordinates(ranks[0]).tp
        y += SIDE / 2 + 8 + 7 * tensor
        canvas.line((x, y - 8 - 7 * tensor), (x, y), (to_x, y), (to_x, y - 8 - 7 * tensor), colour=GREEN, width=2.5)
    for ranks in groups_along("dp_replicate"):
        (x, y), (_, to_y) = centre(ranks[0]), centre(ranks[1])
        x += 18
        canvas.line((x, y + SIDE / 2), (x, to_y - SIDE / 2), colour=RED, width=2.5, stroke_dasharray="6 4")
    for ranks in groups_along("tp"):
        (x, y), (to_x, _) = centre(ranks[0]), centre(ranks[1])
        canvas.line((x, y), (to_x, y), colour=BLUE, width=8)
    for rank in range(LAYOUT.world_size):
        x, y = centre(rank)
        replica = LAYOUT.data_rank(rank)
        colour = (tint(ORANGE, 0.45), "#ffffff")[replica]
        canvas.rect(x - SIDE / 2, y - SIDE / 2, SIDE, SIDE, rx=8, fill=colour, stroke=INK, stroke_width=1.5)
        canvas.text(x, y + 7, str(rank), anchor="middle", size=20, font_weight=600)
    for replica in range(LAYOUT.data_parallel_size):
        y = centre(replica * LAYOUT.tensor_parallel_size)[1]
        canvas.text(12, y - 4, "replica")
        canvas.text(12, y + 14, str(replica))
    lines = (
        (BLUE, 8, "", f"tensor: {groups_along('tp')}", "in each layer, several times: inside one node"),
        (RED, 2.5, "6 4", f"data: {groups_along('dp_replicate')}", "gradients, once per step"),
        (GREEN, 2.5, "", f"pipeline: {groups_along('pp')}", "activations and their gradients, per microbatch"),
    )
    for i, (colour, width, dashes, name, meaning) in enumerate(lines):
        y = 312 + 28 * i
        style = {"stroke_dasharray": dashes} if dashes else {}
        canvas.line((24, y), (52, y), colour=colour, width=width, **style)
        name = name.replace("[[", "").replace("]]", "").replace("], [", " | ").replace(", ", " ")
        canvas.text(62, y + 5, name, size=SMALL, font_weight=600)
        canvas.text(322, y + 5, meaning, fill=MUTED)
    return canvas.svg()
