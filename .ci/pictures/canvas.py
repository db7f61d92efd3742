"""A canvas for hand-written SVG: one font, one palette, one width, and no text smaller than `SMALL`.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; their lightness differs, so they differ
in print too. Pictures have a white background, so they are the same on a light and on a dark page.
"""

from html import escape

WIDTH = 720
SMALL, MEDIUM, LARGE = 14, 15, 17

BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"
PURPLE, SKY, YELLOW, GREY = "#cc79a7", "#56b4e9", "#f0e442", "#8a8f98"
INK, MUTED, RULE, PAPER = "#1f2328", "#57606a", "#c4c9d0", "#ffffff"
RANKS = (BLUE, ORANGE, GREEN, PURPLE)  # where a colour is a rank

FONT = "ui-sans-serif, system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"


def tint(colour: str, share: float = 0.22) -> str:
    """A colour mixed with white."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - channel) * share):02x}" for channel in channels)


def number(value: float) -> str:
    """A coordinate, short and the same on every machine."""
    return f"{value:.1f}".removesuffix(".0")


class Canvas:
    """Elements of one picture, in the order of drawing."""

    def __init__(self, height: float, title: str) -> None:
        self.height, self.title = height, title
        self.elements: list[str] = []
        self.arrow_colours: dict[str, None] = {}

    def rect(self, x: float, y: float, width: float, height: float, **style: object) -> None:
        """A box with rounded corners; `fill`, `stroke`, `rx`, ... as in SVG."""
        style = {"rx": 4, "fill": "none"} | style
        self._add("rect", x=x, y=y, width=width, height=height, **style)

    def text(
        self, x: float, y: float, words: str, *, size: int = SMALL, anchor: str = "start", **style: object
    ) -> None:
        """One line; `y` is the base line."""
        assert size >= SMALL, f"{words!r} is smaller than {SMALL}"
        style = {"fill": INK} | style
        attributes = {"x": x, "y": y, "font_size": size, "text_anchor": anchor, **style}
        self.elements.append(f"<text {_attributes(attributes)}>{escape(words, quote=False)}</text>")

    def heading(self, x: float, y: float, words: str) -> None:
        """One line that names what is below it."""
        self.text(x, y, words, size=MEDIUM, font_weight=600)

    def box(
        self, x: float, y: float, width: float, height: float, *lines: str, colour: str, solid: bool = False
    ) -> None:
        """A box with centred lines: tinted with a dark frame, or solid."""
        light = colour in (ORANGE, SKY, YELLOW, PURPLE)
        self.rect(x, y, width, height, fill=colour if solid else tint(colour), stroke=colour, stroke_width=1.5)
        top = y + height / 2 - (len(lines) - 1) * 9 + 5
        for i, line in enumerate(lines):
            fill = PAPER if solid and not light else INK
            self.text(x + width / 2, top + 18 * i, line, anchor="middle", fill=fill)

    def line(self, *points: tuple[float, float], colour: str = INK, width: float = 1.5, **style: object) -> None:
        """A line through points."""
        self._path(points, colour, width, style)

    def arrow(self, *points: tuple[float, float], colour: str = INK, width: float = 1.5, **style: object) -> None:
        """A line through points with a head at its end."""
        self.arrow_colours[colour] = None
        self._path(points, colour, width, {"marker_end": f"url(#head{colour[1:]})"} | style)

    def curve(self, start: tuple[float, float], end: tuple[float, float], *, colour: str, width: float = 1.5) -> None:
        """An arrow that leaves and arrives horizontally."""
        self.arrow_colours[colour] = None
        middle = number((start[0] + end[0]) / 2)
        (x, y), (to_x, to_y) = (tuple(map(number, point)) for point in (start, end))
        self._add(
            "path",
            d=f"M{x} {y}C{middle} {y} {middle} {to_y} {to_x} {to_y}",
            fill="none",
            stroke=colour,
            stroke_width=width,
            marker_end=f"url(#head{colour[1:]})",
        )

    def key(self, x: float, y: float, entries: list[tuple[str, str]], step: float) -> None:
        """Small squares of a colour, each with its meaning, in a row."""
        for i, (colour, words) in enumerate(entries):
            self.rect(x + i * step, y - 11, 13, 13, rx=2, fill=colour)
            self.text(x + i * step + 19, y, words)

    def svg(self) -> str:
        """The document."""
        heads = "".join(
            f'<marker id="head{colour[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="9" markerHeight="9" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L10 5L0 10z" fill="{colour}"/></marker>'
            for colour in self.arrow_colours
        )
        size = f'width="{WIDTH}" height="{number(self.height)}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {number(self.height)}" {size} '
                f'font-family="{FONT}">',
                f"<title>{escape(self.title)}</title>",
                *([f"<defs>{heads}</defs>"] if heads else []),
                f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{number(self.height - 1)}" rx="8" '
                f'fill="{PAPER}" stroke="{RULE}"/>',
                *self.elements,
                "</svg>\n",
            ]
        )

    def _path(self, points: tuple[tuple[float, float], ...], colour: str, width: float, style: dict) -> None:
        steps = "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self._add("path", d=f"M{steps}", fill="none", stroke=colour, stroke_width=width, **style)

    def _add(self, name: str, **attributes: object) -> None:
        self.elements.append(f"<{name} {_attributes(attributes)}/>")


def _attributes(attributes: dict[str, object]) -> str:
    texts = {name: number(value) if isinstance(value, float) else value for name, value in attributes.items()}
    return " ".join(f'{name.replace("_", "-")}="{text}"' for name, text in texts.items())
