"""Pictures reach the loggers that take images."""

import builtins
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_hybrid.callbacks import pictures as write_and_log_pictures
from lightning_hybrid.callbacks.pictures import figure_of, log_picture, write_picture
from lightning_hybrid.schedule import MemorySample, chain, make_schedule, memory_to_svg, simulate, to_svg

TIMELINE = simulate(make_schedule("1f1b", 2, 4), chain(2), forward_seconds=1.0, backward_seconds=2.0)


class ImageLogger:
    """Takes images as WandbLogger does."""

    def __init__(self):
        self.images = []

    def log_image(self, key, images, step=None, **kwargs):
        self.images.append((key, images, step))


def images_of(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: events.Images(tag) for tag in events.Tags()["images"]}


def test_tensorboard_and_log_image_receive_the_same_pixels(tmp_path):
    svg = to_svg(TIMELINE)
    board, images = TensorBoardLogger(tmp_path), ImageLogger()
    draw = mock.Mock(side_effect=lambda: figure_of(svg))
    log_picture([board, CSVLogger(tmp_path), images], "timeline", draw, 7)
    board.experiment.close()
    assert draw.call_count == 1
    [(key, [pixels], step)] = images.images
    assert (key, step) == ("timeline", 7)
    assert pixels.dtype == numpy.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
    assert len(numpy.unique(pixels.reshape(-1, 3), axis=0)) > 10
    [[image]] = images_of(board.log_dir).values()
    assert (image.step, image.width, image.height) == (7, pixels.shape[1], pixels.shape[0])


def test_nothing_is_drawn_for_other_loggers(tmp_path):
    draw = mock.Mock()
    log_picture([CSVLogger(tmp_path), SimpleNamespace()], "timeline", draw, 1)
    log_picture([], "timeline", draw, 1)
    assert not draw.called


def test_missing_matplotlib_is_reported(tmp_path):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *args, **kwargs)

    images, svg = ImageLogger(), to_svg(TIMELINE)
    with mock.patch.object(builtins, "__import__", without):
        with mock.patch.object(write_and_log_pictures, "rank_zero_info") as info:
            log_picture([images], "timeline", lambda: figure_of(svg), 1)
        assert "'timeline' is not sent to the loggers, as matplotlib is missing" in info.call_args.args[0]
        with pytest.raises(
            ImportError, match=r"step.png needs matplotlib; pip install matplotlib, or end the path in .s"
        ):
            write_picture(svg, tmp_path / "step.png")
        write_picture(svg, tmp_path / "step.svg")
    assert images.images == [] and (tmp_path / "step.svg").read_text() == svg


def blue_share(svg):
    """The share of pixels in which forwards and memory are drawn."""
    pixels = write_and_log_pictures._pixels(figure_of(svg)).astype(int)
    return (pixels[..., 2] - pixels[..., 0] > 30).mean()


def memory_of(*sizes):
    return memory_to_svg([MemorySample(0, float(time), size) for time, size in enumerate(sizes)], 1)


def test_png_shows_boxes_and_areas():
    assert blue_share(to_svg(TIMELINE)) > 0.05
    assert blue_share(memory_of(0, 90, 90, 0)) > 1.2 * blue_share(memory_of(0, 90, 0, 0)) > 0
