"""Traces for viewers of the Trace Event Format, and pictures of memory."""

import json
from xml.etree import ElementTree

import pytest

from lightning_hybrid.schedule import (
    MemorySample,
    Span,
    Timeline,
    chain,
    make_schedule,
    memory_to_svg,
    simulate,
    to_trace,
)

COLUMNS = {"rank": [4, 6], "data": [1, 1]}


def timeline_of(num_pipelines=1, name="1f1b"):
    one = simulate(make_schedule(name, 2, 2), chain(2), forward_seconds=1.0, backward_seconds=2.0)
    spans = [span._replace(rank=span.rank + 2 * index) for index in range(num_pipelines) for span in one.spans]
    return Timeline(tuple(Span(r, a, start + 100, end + 100) for r, a, start, end in spans), 2 * num_pipelines)


def events_of(trace, phase):
    return [event for event in json.loads(json.dumps(trace))["traceEvents"] if event["ph"] == phase]


def test_an_action_is_a_complete_event_in_microseconds():
    trace = to_trace(timeline_of(), columns=COLUMNS)
    events = events_of(trace, "X")
    [last] = [event for event in events if event["pid"] == 4 and event["name"] == "backward 1"]
    assert (last["ts"], last["dur"]) == (7e6, 2e6)
    assert last["args"] == {"action": "0B1", "stage": 0, "microbatch": 1}
    [reduction] = [event for event in events if event["pid"] == 6 and event["name"] == "reduce"]
    assert reduction["args"] == {"action": "1R", "stage": 1}
    assert min(event["ts"] for event in events) == 0
    names = {event["pid"]: event["args"]["name"] for event in events_of(trace, "M") if event["name"] == "process_name"}
    assert names == {4: "rank 4 (data 1)", 6: "rank 6 (data 1)"}
    assert not events_of(trace, "s")


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_arrows_lead_from_the_sender_to_the_receiver_of_the_same_pipeline(name):
    trace = to_trace(timeline_of(num_pipelines=2, name=name), group_size=2, portals=chain(2))
    starts, ends = events_of(trace, "s"), events_of(trace, "f")
    assert len(starts) == len(ends) == 2 * 2 * 2  # pipelines, microbatches, directions
    boxes = events_of(trace, "X")
    for start, end in zip(starts, ends, strict=True):
        assert start["id"] == end["id"] and start["ts"] <= end["ts"]
        assert {start["pid"] // 2, end["pid"] // 2} in ({0}, {1}) and start["pid"] != end["pid"]
        for arrow in (start, end):  # viewers attach an arrow to the box around its end
            inside = [b for b in boxes if b["pid"] == arrow["pid"] and b["ts"] <= arrow["ts"] < b["ts"] + b["dur"]]
            assert len(inside) == 1
    assert len({start["id"] for start in starts}) == len(starts)


def test_memory_is_a_counter_of_each_rank():
    memory = [MemorySample(0, 99.0, 5), MemorySample(1, 101.0, 7)]
    counters = events_of(to_trace(timeline_of(), columns=COLUMNS, memory=memory), "C")
    assert [(event["pid"], event["ts"], event["args"]["bytes"]) for event in counters] == [(4, 0, 5), (6, 2e6, 7)]


def test_memory_is_drawn_to_one_scale():
    samples = [MemorySample(0, 1.0, 2**20), MemorySample(0, 3.0, 3 * 2**20), MemorySample(1, 2.0, 2 * 2**20)]
    root = ElementTree.fromstring(memory_to_svg(samples, 2, kind="memory of <tensors>", columns=COLUMNS))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"largest 3.15 MB", "1.05 MB to 3.15 MB", "2.1 MB to 2.1 MB", "rank", "4", "6"} <= set(texts)
    assert any("memory of <tensors>; a lane is 1.05 MB at its bottom and 3.15 MB at its top" in text for text in texts)
    areas = [polygon.get("points").split() for polygon in root.iter("{http://www.w3.org/2000/svg}polygon")]
    heights = [[float(point.split(",")[1]) for point in points] for points in areas]
    lanes = [float(r.get("y")) for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("rx") == "3"]
    assert heights[0] == [lanes[0] + 30, lanes[0] + 30, lanes[0], lanes[0] + 30]
    assert heights[1][1] == lanes[1] + 15


def test_memory_without_samples():
    ElementTree.fromstring(memory_to_svg([], 2))
