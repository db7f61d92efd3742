"""What every example has: a docstring with its command, public imports alone, and a row in the documentation."""

import ast

import pytest

from harness.example_programs import EXAMPLES

PUBLIC = {f"lightning_hybrid{room}" for room in ("", ".callbacks", ".experts", ".techniques", ".verify")}
PROGRAMS = [*sorted(EXAMPLES.glob("*.py")), *sorted(EXAMPLES.glob("from_ddp/*.py"))]
ENTRIES = [path for path in sorted(EXAMPLES.iterdir()) if not path.name.startswith(("_", "."))]
PAGE = (EXAMPLES.parent / "docs" / "examples.md").read_text()


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_a_program_says_its_command_and_imports_public_names(path):
    tree = ast.parse(path.read_text())
    assert f"python examples/{path.relative_to(EXAMPLES)}" in ast.get_docstring(tree)
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    private = {name for name in imported if name.startswith("lightning_hybrid") and name not in PUBLIC}
    assert private == set()


@pytest.mark.parametrize("path", ENTRIES, ids=lambda path: path.name)
def test_the_documentation_has_a_row(path):
    assert any(line.startswith("|") and f"`examples/{path.name}" in line for line in PAGE.splitlines())
