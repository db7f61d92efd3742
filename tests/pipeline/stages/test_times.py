"""Times of actions by the host's clock and by CUDA events, which are placed on that clock."""

import time

import pytest
import torch

from lightning_hybrid.pipeline.stages.training import ActionRecorder, used_bytes
from lightning_hybrid.schedule import Action, Kind

FORWARD, BACKWARD, OPTIMIZER = Action(Kind.F, 0, 0), Action(Kind.B, 0, 0), Action(Kind.OPTIMIZER, 0)


class Device:
    """A device that is behind its host: an event is reached when the work before it is done."""

    def __init__(self):
        self.milliseconds, self.num_waits, self.num_events = 0.0, 0, 0

    def event(self):
        self.num_events += 1
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.reached = device, None

    def record(self):
        self.reached = self.device.milliseconds

    def synchronize(self):
        self.device.num_waits += 1

    def elapsed_time(self, later):
        return later.reached - self.reached


def recorded_on(device, *, is_read=True):
    recorder = ActionRecorder(torch.device("cuda"), device.event)
    recorder.time_readers |= {"a test"} if is_read else set()
    recorder.begin()
    start = recorder.mark()
    device.milliseconds += 30
    recorder.add(FORWARD, start, waited_seconds=5.0)  # of the host, which waits for no message on a device
    device.milliseconds += 50
    recorder.add_since_last(BACKWARD)
    device.milliseconds += 20
    return recorder


def test_events_are_placed_on_the_clock_of_the_host():
    device = Device()
    recorder = recorded_on(device)
    assert device.num_waits == 0  # a step that is not read waits for nothing
    before = time.perf_counter()
    forward, backward = recorder.spans(3)
    after = time.perf_counter()
    assert device.num_waits == 1
    assert [span.rank for span in (forward, backward)] == [3, 3]
    assert forward.end - forward.start == pytest.approx(0.030)
    assert backward.end - backward.start == pytest.approx(0.050)
    assert backward.start == forward.end
    assert before - 0.020 <= backward.end <= after - 0.020  # the last 20 ms belong to no action


def test_no_event_is_recorded_for_a_step_that_nothing_reads():
    device = Device()
    recorder = recorded_on(device, is_read=False)
    assert recorder.spans(0) == [] and device.num_events == 0
    recorder.memory_readers.add("a test")
    recorder.begin()
    assert device.num_events == 1


def test_the_host_measures_itself_and_leaves_waiting_out():
    recorder = ActionRecorder()
    recorder.begin()
    times = [time.perf_counter()]
    recorder.add(FORWARD, recorder.mark(), waited_seconds=-1.0)
    recorder.add_since_last(OPTIMIZER)
    times.append(time.perf_counter())
    forward, optimizer = recorder.spans(0)
    assert times[0] - 1 <= forward.start <= times[1] - 1
    assert optimizer.start == forward.end <= optimizer.end <= times[1]
    recorder.begin()
    assert recorder.spans(0) == []


def test_wait_for_the_batch_is_that_of_the_device():
    """It begins when launched work is done, and is nothing while the device still works."""
    device = Device()
    recorder = recorded_on(device)
    assert recorder.input_wait() is None
    recorder.end_input()  # of a batch whose fetch was not seen
    assert recorder.input_wait() is None
    recorder.begin_input()
    device.milliseconds += 70  # idle
    recorder.end_input()
    recorder.begin()
    start = recorder.mark()
    device.milliseconds += 30
    recorder.add(FORWARD, start)
    begin, ready = recorder.input_wait()
    assert ready - begin == pytest.approx(0.070)
    assert recorder.spans(0)[0].start == pytest.approx(ready, abs=0.02)
    unread = recorded_on(Device(), is_read=False)
    unread.begin_input()
    unread.end_input()
    assert unread.input_wait() is None


def test_wait_for_the_batch_by_the_host():
    recorder = ActionRecorder()
    before = time.perf_counter()
    recorder.begin_input()
    recorder.end_input()
    recorder.end_input()  # further hooks change nothing
    recorder.begin()
    begin, ready = recorder.input_wait()
    assert before <= begin <= ready <= time.perf_counter()


def test_memory_is_read_at_the_ends_of_actions_on_request():
    recorder = ActionRecorder()
    for is_sampled in (False, True):
        recorder.memory_readers |= {"a test"} if is_sampled else set()
        recorder.begin()
        recorder.add(FORWARD, recorder.mark())
        samples = recorder.memory(1)
        assert len(samples) == 3 * is_sampled
    [span] = recorder.spans(1)
    assert [sample.time for sample in samples[1:]] == [span.start, span.end]
    assert all(sample.rank == 1 for sample in samples)


def test_memory_of_a_process_includes_its_tensors():
    before = used_bytes(torch.device("cpu"))
    kept = torch.ones(2**24)  # 64 MiB
    assert used_bytes(torch.device("cpu")) - before > 0.9 * kept.nbytes
