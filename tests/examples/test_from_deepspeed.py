"""The script of a DeepSpeed user: it runs, prints what it says, and names no option that DeepSpeed alone has."""

import ast
import re
import sys
from pathlib import Path

import pytest

from harness.launched_jobs import run

SCRIPT = Path(__file__).parents[2] / "examples" / "from_deepspeed.py"


def test_it_is_short_and_imports_nothing_of_deepspeed():
    text = SCRIPT.read_text()
    assert len(text.splitlines()) < 80
    assert "deepspeed" not in ast.unparse(ast.parse(text)).partition("import lightning")[2]  # comments alone
    assert text.count("# before: ") >= 5 and '# before: strategy="deepspeed_stage_3_offload"' in text


@pytest.mark.slow
def test_it_prints_what_its_docstring_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, output, _ = run([sys.executable, str(SCRIPT)], timeout=300)
    assert code == 0, output[-4000:]
    [said] = re.findall(r"^    (validation loss .+)$", ast.get_docstring(ast.parse(SCRIPT.read_text())), re.MULTILINE)
    assert said in output
