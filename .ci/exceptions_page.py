"""Write docs/reference/exceptions.md: the classes of lightning_hybrid.errors, linked to their entries in errors.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "exceptions.md"
ROW = re.compile(r'^- <a id="([\w-]+)"></a>(.+?) \(([^()]+)\): ', re.M)
INTRODUCTION = """# Exceptions

Written by `python .ci/exceptions_page.py`; a test fails if it is not up to date. The classes are in
`lightning_hybrid.errors`, which imports neither torch nor Lightning. Each derives from `HybridError` and from the
error in the second column, so `except ValueError` catches a `LayoutError`. The links lead to [errors](../errors.md):
what each message means and what to do.

| class | also a | meaning | entries |
|---|---|---|---|
"""


def page() -> str:
    """The text of the page."""
    rows = ROW.findall((ROOT / "docs" / "errors.md").read_text())
    lines = []
    for node in ast.parse((ROOT / "lightning_hybrid" / "errors.py").read_text()).body:
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(f"`{base}`" for base in map(ast.unparse, node.bases) if base != "HybridError")
            summary, _, more = (ast.get_docstring(node) or "").partition("\n\n")
            attributes = re.findall(r"^ {4}(\w+): ", more, re.M)
            has = f" Attributes: {', '.join(f'`{name}`' for name in attributes)}." if attributes else ""
            links = ", ".join(
                f"[{anchor}](../errors.md#{anchor})"
                for anchor, _, classes in rows
                if node.name in re.findall(r"`(\w+)`", classes)
            )
            meaning = " ".join(summary.split()).replace("``", "`")
            anchor_of_class = f'<a id="{node.name.lower()}"></a>'
            lines.append(f"| {anchor_of_class}`{node.name}` | {bases} | {meaning}{has} | {links} |\n")
    return INTRODUCTION + "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
