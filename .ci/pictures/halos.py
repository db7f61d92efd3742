"""The rows of a feature map on three ranks, and the rows that a convolution reads of its neighbours."""

from canvas import BLUE, GREEN, INK, MUTED, ORANGE, Canvas, tint

from lightning_hybrid.spatial.rows import Rows, owned
from lightning_hybrid.spatial.windows import Window
from lightning_hybrid.tensor.collectives import CountedRanks

LENGTH, SIZE = 14, 3
LAYERS = (("3 x 3, stride 1", Window(3, 1, 1, 1)), ("3 x 3, stride 2", Window(3, 2, 1, 1)))
COLOURS = (BLUE, ORANGE, GREEN)
STEP, WIDTH = 22, 52


def draw() -> str:
    """The picture."""
    canvas = Canvas(480, "Rows of feature maps on three ranks")
    canvas.text(20, 32, f"An image of {LENGTH} rows, spatial_parallel_size={SIZE}", size=17, font_weight=600)
    length, left = LENGTH, 20.0
    for name, window in LAYERS:
        _layer(canvas, left, name, window, length)
        length, left = window.out_length(length), left + 350
    canvas.key(20, 440, [(COLOURS[rank], f"rank {rank}") for rank in range(SIZE)], 100)
    canvas.text(
        20, 466, "Pale rows are received from the rank above or below, and their gradients sent back.", fill=MUTED
    )
    return canvas.svg()


def _layer(canvas: Canvas, left: float, name: str, window: Window, length: int) -> None:
    """A convolution: its input with the halos of each rank, and the rows of its result."""
    canvas.heading(left, 66, name)
    out_length = window.out_length(length)
    needs = window.needs(length, SIZE)
    assert needs is not None
    for rank in range(SIZE):
        rows, x = Rows(length, CountedRanks(rank, SIZE)), left + rank * (WIDTH + 8)
        first, last = needs.of_ranks[rank]
        for row in range(max(0, first), min(length, last)):
            own = rows.offset <= row < rows.offset + rows.local_length
            colour = COLOURS[rank]
            style = {"fill": colour if own else tint(colour, 0.2), "stroke": INK, "rx": 2}
            canvas.rect(x, 84 + STEP * row, WIDTH, STEP - 3, **style)
    x = left + SIZE * (WIDTH + 8) + 34
    canvas.arrow((x - 28, 84 + STEP * length / 2), (x - 4, 84 + STEP * length / 2))
    for rank in range(SIZE):
        first, last = owned(out_length, rank, SIZE)
        for row in range(first, last):
            canvas.rect(x, 84 + STEP * row, WIDTH, STEP - 3, fill=COLOURS[rank], stroke=INK, rx=2)
