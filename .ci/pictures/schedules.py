"""Five schedules of one model on one scale, and the activations that ranks hold, from the simulator."""

from canvas import BLUE, GREEN, INK, MUTED, ORANGE, PAPER, RULE, WIDTH, YELLOW, Canvas, tint

from lightning_hybrid.schedule import Kind, Timeline, chain, make_schedule, simulate

RANKS, MICROBATCHES = 4, 8
WIDE_MICROBATCHES = 12
FORWARD, BACKWARD = 1.0, 2.0  # seconds of one rank's layers
FILL = {Kind.F: BLUE, Kind.B: ORANGE, Kind.I: YELLOW, Kind.W: GREEN}
LEFT, LANE, GAP = 74, 22, 3


def timeline_of(name: str, stages_per_rank: int = 1) -> Timeline:
    """Simulated; a rank's layers cost the same, in however many stages they are."""
    schedule = make_schedule(name, RANKS, MICROBATCHES, stages_per_rank)
    costs = {"forward_seconds": FORWARD / stages_per_rank, "backward_seconds": BACKWARD / stages_per_rank}
    timeline = simulate(schedule, chain(schedule.num_stages), **costs)
    return Timeline(tuple(span for span in timeline.spans if span.action.kind is not Kind.REDUCE), RANKS)


def timeline_of_widths(widths: tuple[int, ...]) -> Timeline:
    """Simulated: two stages on so many ranks each, the first three times as slow as the second."""
    schedule = make_schedule("1f1b", sum(widths), WIDE_MICROBATCHES, widths=widths)
    timeline = simulate(schedule, chain(2), forward_seconds=[3.0, 1.0], backward_seconds=[6.0, 2.0])
    spans = tuple(span for span in timeline.spans if span.action.kind is not Kind.REDUCE)
    return Timeline(spans, sum(widths))


def held_by(timeline: Timeline, rank: int) -> list[tuple[float, float]]:
    """The activations that a rank holds, in microbatches of all of its layers, from each of the times on."""
    spans = [span for span in timeline.spans if span.rank == rank]
    stages = len({span.action.stage for span in spans})
    last = {(span.action.stage, span.action.microbatch): span.end for span in spans}  # B, or W behind I
    changes = [(span.start, 1 / stages) for span in spans if span.action.kind is Kind.F]
    changes += [(end, -1 / stages) for end in last.values()]
    held, points = 0.0, {0.0: 0.0}
    for when, change in sorted(changes):
        held += change
        points[when] = held  # the last of the changes at one time
    return list(points.items())


def most_held(timeline: Timeline) -> float:
    """The most that any rank holds at a time."""
    return max(held for rank in range(timeline.num_ranks) for _, held in held_by(timeline, rank))


def draw() -> str:
    """The five schedules, one below the other."""
    panels = (
        ('schedule="gpipe"', timeline_of("gpipe")),
        ('schedule="1f1b" (default)', timeline_of("1f1b")),
        ('schedule="1f1b", stages_per_rank=2', timeline_of("interleaved_1f1b", 2)),
        ('schedule="zero_bubble"', timeline_of("zero_bubble")),
        ('schedule="zero_bubble_v"', timeline_of("zero_bubble_v", 2)),
    )
    scale = (WIDTH - LEFT - 20) / max(timeline.makespan_seconds for _, timeline in panels)
    height = RANKS * (LANE + GAP) + 58
    canvas = Canvas(72 + len(panels) * height + 12, "Five pipeline schedules on one scale")
    canvas.key(LEFT, 30, [(FILL[Kind.F], "forward"), (FILL[Kind.B], "backward")], 100)
    canvas.key(LEFT + 210, 30, [(FILL[Kind.I], "gradient of inputs"), (FILL[Kind.W], "gradient of weights")], 170)
    canvas.text(LEFT, 54, "numbers are microbatches; lighter: the second stage of a rank; grey: idle", fill=MUTED)
    for i, (name, timeline) in enumerate(panels):
        _panel(canvas, 72 + i * height, name, timeline, scale)
    return canvas.svg()


def draw_widths() -> str:
    """A slow stage before a fast one, with equal numbers of ranks and with unequal ones."""
    panels = (
        ("pipeline_parallel_size=2", timeline_of_widths((1, 1))),
        ("stage_widths=[3, 1]", timeline_of_widths((3, 1))),
    )
    scale = (WIDTH - LEFT - 20) / max(timeline.makespan_seconds for _, timeline in panels)
    heights = [timeline.num_ranks * (LANE + GAP) + 58 for _, timeline in panels]
    canvas = Canvas(72 + sum(heights) + 12, "A slow stage on one rank and on three")
    canvas.key(LEFT, 30, [(FILL[Kind.F], "forward"), (FILL[Kind.B], "backward")], 100)
    words = f"{WIDE_MICROBATCHES} microbatches, whose number is in the boxes; the first stage takes three times as long"
    canvas.text(LEFT, 54, words, fill=MUTED)
    for i, (name, timeline) in enumerate(panels):
        _panel(canvas, 72 + sum(heights[:i]), name, timeline, scale)
    return canvas.svg()


def _panel(canvas: Canvas, top: float, name: str, timeline: Timeline, scale: float) -> None:
    end = LEFT + timeline.makespan_seconds * scale
    canvas.heading(LEFT, top + 20, name)
    canvas.text(WIDTH - 20, top + 20, f"bubble {timeline.bubble:.1%}", anchor="end", font_weight=600)
    ranks = timeline.num_ranks
    for rank in range(ranks):
        y = top + 30 + rank * (LANE + GAP)
        canvas.text(LEFT - 8, y + 16, f"rank {rank}", anchor="end", fill=MUTED)
        canvas.rect(LEFT, y, end - LEFT, LANE, rx=2, fill=tint(INK, 0.08))
    for span in timeline.spans:
        action, y = span.action, top + 30 + span.rank * (LANE + GAP)
        x, width = LEFT + span.start * scale, (span.end - span.start) * scale
        second = action.stage >= RANKS  # the second stage of a rank, lighter
        fill = tint(FILL[action.kind], 0.6) if second else FILL[action.kind]
        canvas.rect(x, y, width, LANE, rx=2, fill=fill, stroke=PAPER, stroke_width=1)
        if width > 11:
            dark = second or action.kind in (Kind.B, Kind.I)
            style = {"fill": INK if dark else PAPER}
            canvas.text(x + width / 2, y + 16, str(action.microbatch), anchor="middle", **style)
    y = top + 30 + ranks * (LANE + GAP)
    words = (
        f"{timeline.makespan_seconds:g} s; a rank holds the activations of at most {most_held(timeline):g} microbatches"
    )
    canvas.line((end, top + 28), (end, y + 4), colour=RULE)
    canvas.text(max(end, LEFT + 440), y + 15, words, anchor="end", fill=MUTED)


def draw_activations() -> str:
    """Activations of the first and the last rank over a step, under GPipe and 1F1B."""
    names = ("gpipe", "1f1b")
    timelines = {name: timeline_of(name) for name in names}
    seconds = max(timeline.makespan_seconds for timeline in timelines.values())
    scale, unit, panel = (WIDTH - LEFT - 20) / seconds, 14, 176
    canvas = Canvas(44 + len(names) * panel + 20, "Activations held during a step")
    canvas.text(20, 30, "Activations that a rank holds during a step, in microbatches", size=17, font_weight=600)
    for i, name in enumerate(names):
        floor = 44 + i * panel + 150
        canvas.heading(LEFT + 8, floor - 126, f'schedule="{name}"')
        for level in range(0, MICROBATCHES + 1, 2):
            y = floor - level * unit
            canvas.line((LEFT, y), (WIDTH - 20, y), colour=RULE, width=1)
            canvas.text(LEFT - 8, y + 5, str(level), anchor="end", fill=MUTED)
        for rank, colour in ((0, BLUE), (RANKS - 1, ORANGE)):
            points, last = [], 0.0
            for when, held in held_by(timelines[name], rank):
                x = LEFT + when * scale
                points += [(x, floor - last * unit), (x, floor - held * unit)]
                last = held
            style = {} if rank else {"stroke_dasharray": "7 3"}
            canvas.line(*points, colour=colour, width=3, **style)
            most = max(held for _, held in held_by(timelines[name], rank))
            x = WIDTH - 300 + (0 if rank == 0 else 150)
            canvas.line((x, floor - 131), (x + 26, floor - 131), colour=colour, width=3, **style)
            canvas.text(x + 32, floor - 126, f"rank {rank}: {most:g}")
    canvas.text(WIDTH - 20, 44 + len(names) * panel - 4, f"{seconds:g} s", anchor="end", fill=MUTED)
    canvas.text(LEFT, 44 + len(names) * panel - 4, "0", fill=MUTED)
    return canvas.svg()
