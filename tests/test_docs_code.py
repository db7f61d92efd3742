"""Code in the documentation runs as it is printed.

A Python block is run in an empty folder, unless `<!-- notest -->` is on the line before its fence, or `notest` in it.
A block that begins with `# NAME.py` (or `.yaml`) is a file of its page: the page's bash blocks run there, and run it
if they name it.
"""

import ast
import importlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}

_FENCE = re.compile(
    r"(?P<skip><!-- notest -->\n+)?^```(?P<language>\w+)(?P<rest>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
_NAME = re.compile(r"# ([\w.-]+\.(?:py|yaml))\n")
_SLOW = ("Trainer(", "CLI(", "verify(", "torchao")  # start processes, or import what takes long
_FAST_PAGES = {"docs/howto/notebooks.md"}  # one fit of forked ranks
_EXTENDED = ("import torch", "from torch", "lightning")  # load torch in an interpreter of their own


@dataclass(frozen=True)
class Block:
    page: str
    number: int
    language: str
    body: str
    is_run: bool

    @property
    def name(self) -> str | None:
        match = _NAME.match(self.body)
        return match and match[1]


def blocks_of(page: str) -> list[Block]:
    found = enumerate(_FENCE.finditer(PAGES[page].read_text(encoding="utf-8")), 1)
    return [
        Block(page, number, match["language"], match["body"], not match["skip"] and "notest" not in match["rest"])
        for number, match in found
    ]


def commands_of(page: str) -> str:
    return "".join(block.body for block in blocks_of(page) if block.language == "bash" and block.is_run)


def write_files(page: str, folder: Path) -> None:
    for block in blocks_of(page):
        if block.name is not None:
            (folder / block.name).write_text(block.body, encoding="utf-8")


def run(*command: str, folder: Path, timeout: float) -> None:
    """Run a command with this package; a run that takes longer ends with all processes that it has started."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    job = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=timeout)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
    assert job.returncode == 0, output[-4000:]


PYTHON = [block for page in PAGES for block in blocks_of(page) if block.language == "python"]
ALONE = [block for block in PYTHON if block.is_run and not (block.name and block.name in commands_of(block.page))]


def is_slow(block: Block) -> bool:
    return block.page not in _FAST_PAGES and any(text in block.body for text in _SLOW)


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"{block.page}-{block.number}")
def test_a_block_is_python_and_its_imports_of_this_package_exist(block):
    for node in ast.walk(ast.parse(block.body)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_hybrid"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


def is_extended(block: Block) -> bool:
    return block.page not in _FAST_PAGES and any(text in block.body for text in _EXTENDED)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            block,
            id=f"{block.page}-{block.number}",
            marks=[pytest.mark.slow] * is_slow(block) + [pytest.mark.extended] * is_extended(block),
        )
        for block in ALONE
    ],
)
def test_a_block_runs(block, tmp_path):
    write_files(block.page, tmp_path)
    path = tmp_path / (block.name or "block.py")
    path.write_text(block.body, encoding="utf-8")
    run(sys.executable, path.name, folder=tmp_path, timeout=180)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)])
def test_the_commands_of_a_page_run(page, tmp_path):
    write_files(page, tmp_path)
    run("bash", "-euc", commands_of(page), folder=tmp_path, timeout=600)
