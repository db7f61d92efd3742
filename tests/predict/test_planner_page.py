"""docs/planner.md and its pictures are those that `.ci/planner_page.py` writes."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / ".ci" / "planner_page.py"))


def test_page_is_up_to_date(script):
    found = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    assert found == script["page"](), "run PYTHONPATH=. python .ci/planner_page.py"


def test_pictures_are_up_to_date(script):
    for name, picture in script["pictures"]().items():
        assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8") == picture
