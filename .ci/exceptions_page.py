"""Write docs/reference/exceptions.md: each class of lightning_hybrid.errors, with its messages in docs/errors.md."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "exceptions.md"
ROW = re.compile(r'^\| <a id="([\w-]+)"></a>(.+?) \| (.+?) \|', re.M)
INTRODUCTION = """# Exceptions

Written by `python .ci/exceptions_page.py`; a test fails if it is not up to date. The classes are in
`lightning_hybrid.errors`, which imports neither torch nor Lightning. Each derives from `HybridError` and a built-in
error, so that `except ValueError` catches a `LayoutError`. The links lead to the messages of a class in
[errors](../errors.md), with causes and what to do.
"""


def page() -> str:
    """The text of the page."""
    rows = ROW.findall((ROOT / "docs" / "errors.md").read_text())
    text = INTRODUCTION
    for node in ast.parse((ROOT / "lightning_hybrid" / "errors.py").read_text()).body:
        if isinstance(node, ast.ClassDef):
            bases = " and ".join(f"`{ast.unparse(base)}`" for base in node.bases)
            summary, _, more = (ast.get_docstring(node) or "").partition("\n\n")
            text += f"\n## `{node.name}`\n\n{bases}. {_in_one_line(summary)}\n"
            if attributes := re.findall(r"^ {4}(\w+): ((?:.+\n?(?: {8}.+\n?)*))", more + "\n", re.M):
                lines = [f"- `{name}` (attribute): {_in_one_line(what)}" for name, what in attributes]
                text += "\n" + "\n".join(lines) + "\n"
            text += _links(rows, {node.name})
    builtin = {name for _, _, classes in rows for name in re.findall(r"`(\w+)`", classes) if hasattr(builtins, name)}
    for name in sorted(builtin):
        text += f"\n## Messages of `{name}`\n{_links(rows, {name})}"
    return text


def _in_one_line(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")


def _links(rows: list[tuple[str, str, str]], names: set[str]) -> str:
    """Links to the rows of some classes."""
    links = [
        f"- [{re.findall(r'`[^`]+`', messages)[0]}](../errors.md#{anchor})"
        for anchor, messages, classes in rows
        if names & set(re.findall(r"`(\w+)`", classes))
    ]
    return "\n" + "\n".join(links) + "\n" if links else ""


if __name__ == "__main__":
    PAGE.write_text(page())
