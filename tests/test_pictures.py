"""Pictures of the documentation: up to date, inside their frames, legible on a phone, and each shown on a page."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
MEASURED = {"memory_8_ranks", "timeline_8_ranks", "stage_widths_measured"}  # by a run, as quickstart_timeline.png is
PLANNED = {"planner_time", "planner_memory"}  # drawn by .ci/planner_page.py
DRAWN = sorted({path.stem for path in FOLDER.glob("*.svg")} - MEASURED - PLANNED)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.extended
def test_pictures_are_up_to_date(tmp_path):
    script = ROOT / ".ci" / "pictures" / "draw.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, script, tmp_path], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert sorted(path.stem for path in tmp_path.iterdir()) == DRAWN
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (FOLDER / path.name).read_bytes(), f"{path.name}: run python .ci/pictures/draw.py"


def texts_of(name):
    return ElementTree.parse(FOLDER / f"{name}.svg").getroot().iter(f"{SVG}text")


def width_of(text):
    """In the widest of the fonts that the pictures name."""
    weight = "bold" if text.get("font-weight") else "normal"
    font = FontProperties(family="DejaVu Sans", weight=weight, size=float(text.get("font-size")))
    width, _, _ = TextToPath().get_text_width_height_descent(text.text, font, False)
    return width


@pytest.mark.parametrize("name", DRAWN)
def test_texts_end_inside_the_picture(name):
    for text in texts_of(name):
        if text.get("transform") is None:
            width = width_of(text)
            left = float(text.get("x")) - width * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
            assert left >= 4 and left + width <= 716, (text.text, left, left + width)


@pytest.mark.parametrize("name", DRAWN)
def test_texts_are_legible_on_a_phone(name):
    """A picture scrolls rather than being narrower than the width in the style sheet: texts are 11 px high there."""
    root = ElementTree.parse(FOLDER / f"{name}.svg").getroot()
    style = (ROOT / "docs" / "stylesheets" / "site.css").read_text()
    [least] = re.findall(r'img\[src\*="pictures/"\] \{[^}]*min-width: (\d+)px', style)
    smallest = min(float(text.get("font-size")) for text in texts_of(name))
    assert smallest * float(least) / float(root.get("width")) >= 11


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_every_picture_is_on_a_page_with_a_description(path):
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = [
        alt for page in pages for alt in re.findall(rf"!\[([^\]]*)\]\(\S*pictures/{path.name}\)", page.read_text())
    ]
    assert found and all(len(alt.split()) > 4 for alt in found)


def test_all_pictures_together_are_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2**20
