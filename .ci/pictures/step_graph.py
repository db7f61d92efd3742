"""The graph of one step, recorded, and its partition into two stages: portals, and a parameter of both stages."""

import torch
from canvas import BLUE, GREEN, GREY, INK, MUTED, ORANGE, RED, Canvas, tint
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.graph.partition import Assignment, assign, owner_stages
from lightning_hybrid.graph.step_graph import Node
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.recording.record import Recipe

STAGES, WIDTH, VOCABULARY = 2, 32, 64
TOPS, HEIGHT = (110, 300), 44  # of the nodes of each stage


class Model(nn.Module):
    """Blocks with residuals, a skip over all of them, and a head that uses the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))

    def step(self, ids: Tensor) -> Tensor:
        """The loss."""
        first = x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(F.linear(x + first, self.embed.weight), ids)


def partitioned() -> Assignment:
    """The recorded step in stages."""
    model, ids = Model(), torch.arange(8)
    units = {"embed": model.embed} | {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
    randomness = KeyedRandomness(0, torch.device("cpu"))
    graph = Recipe(model, lambda: model.step(ids), units, name="training_step", randomness=randomness).record().graph
    return assign(graph, owner_stages(graph, STAGES), STAGES)


def draw() -> str:
    """The picture."""
    assignment = partitioned()
    canvas = Canvas(430, "A step graph in two stages")
    canvas.text(20, 32, "One training step, recorded and partitioned", size=17, font_weight=600)
    boxes: dict[int, tuple[float, float, float]] = {}  # left, width, top of each node
    for stage, top in enumerate(TOPS):
        canvas.rect(12, top - 58, 696, 126, rx=8, fill=tint(INK, 0.03), stroke=tint(INK, 0.35), stroke_dasharray="5 4")
        canvas.text(696, top - 38, f"stage {stage}", anchor="end", fill=MUTED)
        x = 24.0
        for node, of in zip(assignment.graph.nodes, assignment.node_stage, strict=True):
            if of == stage:
                width = 9.2 * len(node.unit or node.name) + 10
                boxes[node.index] = (x, width, top)
                x += width + 26
    for value in range(len(assignment.graph.values)):
        _edges(canvas, assignment, value, boxes)
    shared = {name for name, stages in assignment.shared.items() for _ in stages}
    for node in assignment.graph.nodes:
        x, width, top = boxes[node.index]
        colour = ORANGE if shared & set(node.parameters) else BLUE if node.unit else GREY
        canvas.box(x, top, width, HEIGHT, node.unit or node.name, colour=colour)
    canvas.key(20, 394, [(BLUE, "unit"), (GREY, "operation of your code")], 80)
    canvas.key(300, 394, [(ORANGE, "parameter on both stages: " + ", ".join(sorted(shared)))], 0)
    canvas.line((20, 415), (44, 415), colour=RED, width=2.5)
    canvas.text(52, 420, "portal: a value of one stage that another reads; its gradient is sent back", fill=INK)
    return canvas.svg()


def _edges(canvas: Canvas, assignment: Assignment, value: int, boxes: dict[int, tuple[float, float, float]]) -> None:
    """Arrows from the node that makes a value to those that read it."""
    source: Node = assignment.graph.made_by(value)
    x, width, top = boxes[source.index]
    above = 14 + 9 * (value // 2 % 2)  # lines of two values do not meet
    arrived: dict[int, float] = {}  # where it comes to another stage
    for node, stage in zip(assignment.graph.nodes, assignment.node_stage, strict=True):
        if value not in node.inputs:
            continue
        to_x, to_width, to_top = boxes[node.index]
        end = to_x + to_width / 2
        if stage in arrived:
            points = (arrived[stage], to_top - above), (end - 7, to_top - above), (end - 7, to_top)
            canvas.arrow(*points, colour=RED, width=2.5)
        elif stage != assignment.value_stage[value]:
            start, middle = x + width / 2, (top + HEIGHT + to_top) / 2 - 12 + 10 * (value == 0)
            canvas.arrow((start, top + HEIGHT), (start, middle), (end, middle), (end, to_top), colour=RED, width=2.5)
            arrived[stage] = end
        elif to_x - x - width < 30:
            canvas.arrow((x + width, top + HEIGHT / 2), (to_x, top + HEIGHT / 2))
        else:
            start, end = x + width / 2 + 7, end - 7
            canvas.arrow((start, top), (start, top - above), (end, top - above), (end, top), colour=GREEN)
