"""A transformer block over two tensor ranks: the plan that the search finds, with the shapes of the shards."""

import torch
from canvas import BLUE, GREY, INK, MUTED, ORANGE, RED, Canvas, tint
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.params.placement import shard_tensor
from lightning_hybrid.tensor.plan.unit_plan import UnitPlan
from lightning_hybrid.tensor.search.unit_search import plan_unit

WIDTH, HEADS, SIZE = 512, 8, 2


class Block(nn.Module):
    """Attention and an MLP, each behind a norm, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, positions, width] to the same."""
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        heads = (part.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def draw() -> str:
    """The picture."""
    block = Block()
    plan = plan_unit(block, (torch.randn(2, 16, WIDTH, requires_grad=True),), {}, SIZE)
    canvas = Canvas(530, "A transformer block over two tensor ranks")
    canvas.text(
        20, 32, f"A block of width {WIDTH} with {HEADS} heads, tensor_parallel_size={SIZE}", size=17, font_weight=600
    )
    middles = {"qkv": f"{HEADS // SIZE} of {HEADS} heads", "up": "gelu"}
    for i, group in enumerate(plan.groups):
        [column], [row] = group.columns, group.rows
        _pair(canvas, 56 + 206 * i, block, plan, (f"norm_{i + 1}", column, middles[column], row))
    canvas.key(20, 484, [(GREY, "full on every rank")], 0)
    canvas.key(190, 484, [(BLUE, "colwise: own output features"), (ORANGE, "rowwise: own input features")], 260)
    canvas.text(20, 510, "In the backward, the gradient of each region's input is all-reduced.", fill=MUTED)
    return canvas.svg()


def _pair(canvas: Canvas, top: float, block: Block, plan: UnitPlan, names: tuple[str, str, str, str]) -> None:
    norm, column, between, row = names
    parameters = dict(block.named_parameters())
    canvas.rect(218, top, 364, 186, rx=8, fill=tint(INK, 0.03), stroke=tint(INK, 0.35), stroke_dasharray="5 4")
    canvas.text(400, top + 19, "region: no messages", anchor="middle", fill=MUTED)
    middle = top + 104
    canvas.box(20, middle - 26, 44, 52, "x", colour=GREY)
    canvas.box(96, middle - 26, 84, 52, norm, colour=GREY)
    canvas.arrow((64, middle), (94, middle))
    for rank in range(SIZE):
        y = top + 34 + 76 * rank
        shapes = []
        for name in (column, row):
            weight = parameters[f"{name}.weight"]
            shard = shard_tensor(weight, plan.placements[f"{name}.weight"], rank, SIZE)
            shapes.append(f"{shard.shape[0]} x {shard.shape[1]}")
        canvas.text(228, y + 15, f"rank {rank}", fill=MUTED)
        canvas.box(228, y + 20, 104, 44, column, shapes[0], colour=BLUE)
        canvas.box(352, y + 20, 96, 44, between, colour=GREY)
        canvas.box(468, y + 20, 104, 44, row, shapes[1], colour=ORANGE)
        line = y + 42
        canvas.curve((180, middle), (226, line), colour=INK)
        canvas.arrow((332, line), (350, line))
        canvas.arrow((448, line), (466, line))
        canvas.arrow((572, line), (598, line), colour=RED, width=2.5)
    canvas.rect(600, top + 30, 30, 146, fill=tint(RED, 0.25), stroke=RED, stroke_width=1.5)
    canvas.text(0, 0, "all-reduce", anchor="middle", transform=f"translate(620 {middle}) rotate(-90)")
    canvas.arrow((630, middle), (650, middle))
    canvas.box(652, middle - 26, 48, 52, "+ x", colour=GREY)
