from xml.etree import ElementTree

import pytest

from harness.schedule_proof import action_of
from lightning_hybrid.schedule import Span, Timeline, chain, simulate, to_svg, to_text
from lightning_hybrid.schedule.generators import one_f_one_b


def simulated(p=3, m=4, **costs):
    costs = {"forward_seconds": 1.0, "backward_seconds": 2.0, **costs}
    return simulate(one_f_one_b(p, m), chain(p), **costs)


def spans(*texts):
    """Spans written as 'rank action start end'."""
    return tuple(
        Span(int(rank), action_of(action), float(start), float(end))
        for rank, action, start, end in map(str.split, texts)
    )


def test_text_shows_the_schedule():
    assert to_text(simulated(), width=54).splitlines() == [
        "rank 0 F0-F1-F2-............B0----F3-B1----...B2----...B3----",
        "rank 1 ...F0-F1-......B0----F2-B1----F3-B2----...B3----......",
        "rank 2 ......F0-B0----F1-B1----F2-B2----F3-B3----............",
        "       0                                                 18 s",
        "bubble 33.3%",
    ]


def test_text_is_truncated():
    lanes = to_text(simulated(p=2, m=30), width=60).splitlines()[:2]
    assert all(len(lane) == len("rank 0 ") + 60 for lane in lanes)
    assert "F" in lanes[0] and "B" in lanes[0]


def texts_of(svg):
    root = ElementTree.fromstring(svg)
    return ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_svg_elements():
    texts = texts_of(to_svg(simulated(reduce_seconds=2.0), title="1F1B <of> 3 & 4"))
    assert "1F1B <of> 3 & 4" in texts
    assert {"rank 0", "rank 1", "rank 2", "forward", "backward", "reduce"} <= set(texts)
    assert "bubble 30.0%" in texts
    assert texts.count("3") == 2 * 3
    assert "10 s" in texts
    assert "input gradient" not in texts


@pytest.mark.parametrize(("seconds", "unit"), [(1e-8, "ns"), (1e-5, "µs"), (1e-3, "ms"), (1.0, "s"), (3600.0, "s")])
def test_time_units(seconds, unit):
    timeline = simulated(forward_seconds=seconds, backward_seconds=seconds)
    ticks = [text for text in texts_of(to_svg(timeline)) if text.endswith(f" {unit}")]
    assert 5 <= len(ticks) <= 12
    assert to_text(timeline).splitlines()[-2].endswith(f" {unit}")


def test_measured_timeline_with_gaps_overlaps_and_late_start():
    timeline = Timeline(spans("0 0F0 100 101", "0 0B0 100.5 102", "1 1F0 101 102", "1 1B0 103 104"), num_ranks=2)
    assert timeline.makespan_seconds == 4.0
    assert timeline.busy_seconds == (2.0, 2.0)
    assert timeline.bubble == 0.5
    ElementTree.fromstring(to_svg(timeline))
    assert to_text(timeline, width=8).splitlines()[1] == "rank 1 ..F0..B0"


def test_empty_timeline():
    timeline = Timeline((), num_ranks=2)
    assert timeline.bubble == 0.0
    ElementTree.fromstring(to_svg(timeline))
    assert "rank 1" in to_text(timeline)


def test_costs_per_stage_and_transfers():
    timeline = simulated(p=2, m=1, forward_seconds=[1.0, 3.0], backward_seconds=[2.0, 6.0], transfer_seconds=0.5)
    assert timeline.makespan_seconds == 1 + 0.5 + 3 + 6 + 0.5 + 2
    with pytest.raises(ValueError, match="forward_seconds has 3 numbers for 2 stages"):
        simulated(p=2, forward_seconds=[1.0, 2.0, 3.0])


def test_the_shortest_actions_can_be_seen():
    root = ElementTree.fromstring(to_svg(simulated(p=2, reduce_seconds=1e-6)))
    boxes = [group.find("{http://www.w3.org/2000/svg}rect") for group in root.iter("{http://www.w3.org/2000/svg}g")]
    assert min(float(box.get("width")) for box in boxes) == 3.0
    assert max(float(box.get("x")) + float(box.get("width")) for box in boxes) <= 980
    assert boxes[-1].get("width") == "3.00"  # drawn last, above its neighbours
