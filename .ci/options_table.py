"""Write docs/reference/options.md: every option of the strategy, and the names that other libraries give them.

PYTHONPATH=. python .ci/options_table.py
"""

import ast
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.accelerators import CPUAccelerator

from lightning_hybrid import HybridPrecision
from lightning_hybrid.strategies.options.foreign import ADVICE
from lightning_hybrid.techniques import LayerTechnique

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "options.md"
STRATEGY = ROOT / "lightning_hybrid" / "strategies" / "hybrid3d.py"
REGISTRATION = ROOT / "lightning_hybrid" / "registration.py"

NOTES = ROOT / ".ci" / "option_notes.yaml"

IN_EXAMPLES = (CPUAccelerator, LayerTechnique, LightningEnvironment, TorchCheckpointIO, HybridPrecision, timedelta)

HEAD = """\
# Options of the strategy

Pass any option by keyword, or in the YAML file of a `LightningCLI` under `trainer.strategy.init_args`. To choose sizes,
read [layouts](../layouts.md). [Names of other libraries](#names-of-other-libraries) and
[registered names](#registered-names) are at the end.

<!-- Written by `PYTHONPATH=. python .ci/options_table.py` from the strategy's docstring and .ci/option_notes.yaml. -->

## Overview
"""

COLUMNS = "\n| option | default | in short |\n|---|---|---|\n"

OTHERS = """
## Names of other libraries

The strategy refuses these, in Python and in YAML, with the text of the right column. [Migration](../migration.md) has
more of each library. accelerate has the names of FSDP too, with `fsdp_` before them.
"""

NAMES = """
## Registered names

`Trainer(strategy=NAME)` makes the strategy with the options of this table, and all others at their defaults.

| name | options |
|---|---|
"""


def parse(path: Path) -> ast.Module:
    """Parse a file of Python."""
    return ast.parse(path.read_text())


def strategy_class() -> ast.ClassDef:
    """The definition of the strategy's class."""
    [node] = [node for node in parse(STRATEGY).body if isinstance(node, ast.ClassDef)]
    return node


def signature() -> dict[str, tuple[ast.expr, ast.expr]]:
    """Annotation and default of each argument of the strategy, by name; each has a default."""
    methods = (node for node in strategy_class().body if isinstance(node, ast.FunctionDef))
    arguments = next(node.args for node in methods if node.name == "__init__")
    names = [*arguments.args[1:], *arguments.kwonlyargs]  # not the names of other libraries
    pairs = zip(names, [*arguments.defaults, *arguments.kw_defaults], strict=True)
    return {argument.arg: (argument.annotation, default) for argument, default in pairs}


def meanings() -> dict[str, str]:
    """The text of each argument in the docstring's `Args`, by name, in the order of the docstring."""
    section = re.search(r"^Args:\n(.*?)\n\n", ast.get_docstring(strategy_class()), re.M | re.S)[1]
    found = {}
    for entry in re.split(r"\n(?=    \S)", section):
        name, _, text = entry.strip().partition(":")
        found[name] = " ".join(text.split()).replace("``", "`")
    return {name: text for name, text in found.items() if not name.startswith("**")}


def aliases(tree: ast.Module) -> dict[str, ast.expr]:
    """The type aliases that a file assigns, by name."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
            found[node.target.id] = node.value
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            found[node.targets[0].id] = node.value
    return found


def imported_aliases(tree: ast.Module) -> dict[str, ast.expr]:
    """The type aliases of the files of the package from which a file imports, by name."""
    modules = {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
    paths = (ROOT / (module.replace(".", "/") + ".py") for module in sorted(modules))
    return {name: value for path in paths if path.exists() for name, value in aliases(parse(path)).items()}


def alternatives(annotation: ast.expr, known: dict[str, ast.expr]) -> list[str]:
    """The types that a union has, with the values of a `Literal` one by one, and aliases replaced by what they name."""
    if isinstance(annotation, ast.BinOp):
        return [*alternatives(annotation.left, known), *alternatives(annotation.right, known)]
    if isinstance(annotation, ast.Name) and annotation.id in known:
        return alternatives(known[annotation.id], known)
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        values = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        return [in_double_quotes(value) for value in values]
    inner = (node.id for node in ast.walk(annotation) if isinstance(node, ast.Name) and node.id in known)
    text = ast.unparse(annotation)
    for name in inner:
        text = re.sub(rf"\b{name}\b", f"Union[{', '.join(alternatives(known[name], known))}]", text)
    return [text]


def in_double_quotes(value: ast.expr) -> str:
    """The source of an expression; strings in double quotes."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return f'"{value.value}"'
    return ast.unparse(value)


def notes() -> dict[str, dict[str, dict[str, Any]]]:
    """The file of notes: options by subject."""
    return yaml.safe_load(NOTES.read_text())


def in_card(kind: str, head: str, lines: list[str]) -> str:
    """A table whose rows the site shows as cards (docs/stylesheets/site.css)."""
    text = f'\n<div class="{kind}" markdown>\n{head}' + "\n".join(lines) + "\n\n</div>\n"
    assert len({line.count("|") for line in lines}) == 1, "a cell holds a vertical bar"
    return text


def shortened(text: str) -> str:
    """The first clause of an option's text."""
    return re.split(r"(?<=[^.])[.;:](?: |$)", text)[0]


def options() -> str:
    """A row for each option, then a section for each, by subject.

    Raises:
        ValueError: An option has no text in the docstring or no note, or one of these is of no option.
    """
    found, texts, subjects = signature(), meanings(), notes()["subjects"]
    for what, names in (("docstring", set(texts)), ("notes", {name for each in subjects.values() for name in each})):
        if unequal := found.keys() ^ names:
            raise ValueError(f"in only one of signature and {what}: {', '.join(sorted(unequal))}")
    known, rows, sections = imported_aliases(parse(STRATEGY)), [], []
    for subject, of_subject in subjects.items():
        sections.append(f"\n## {subject}\n")
        for name, note in of_subject.items():
            annotation, default = found[name]
            types = ", ".join(f"`{kind}`" for kind in dict.fromkeys(alternatives(annotation, known)))
            default_text = f"`{in_double_quotes(default)}`"
            rows.append(f"| [`{name}`](#{name}) | {default_text} | {shortened(texts[name])} |")
            sections.append(f"\n### `{name}`\n\n{types}; default {default_text}\n\n{texts[name]}\n\n")
            said = {"Constraints": note.get("constraints"), "Cost": note.get("cost"), "Example": f"`{note['example']}`"}
            sections += [f"- **{title}**: {text}\n" for title, text in said.items() if text]
    return in_card("names", COLUMNS, rows) + "".join(sections)


def keywords(source: str) -> dict[str, Any]:
    """The keywords that `Hybrid3DStrategy(source)` passes."""
    return eval(f"dict({source})", {"torch": torch, "nn": torch.nn, **{each.__name__: each for each in IN_EXAMPLES}})


def names_of_others() -> str:
    """A table for each library: keywords, and what is set here instead."""
    tables = []
    for library, advice in ADVICE.items():
        given: dict[str, list[str]] = {}
        for name, text in advice.items():
            if name.removeprefix("fsdp_") in ADVICE["FSDP"].keys() - advice.keys():
                continue
            given.setdefault(text, []).append(f"`{name}`")
        lines = [f"| {'<br>'.join(names)} | {text} |" for text, names in given.items()]
        tables.append(in_card("names", f"\n| {library} | here |\n|---|---|\n", lines))
    return OTHERS + "".join(tables)


def registered() -> list[str]:
    """One line for each name under which the strategy is registered with Lightning."""
    assigned = (node for node in parse(REGISTRATION).body if isinstance(node, ast.AnnAssign))
    names = ast.literal_eval(next(node.value for node in assigned if node.target.id == "_NAMES"))
    lines = []
    for name, options in names.items():
        texts = (f"{key}={in_double_quotes(ast.Constant(value))}" for key, value in options.items())
        lines.append(f'| `"{name}"` | {", ".join(f"`{text}`" for text in texts) or "none"} |')
    return lines


def page() -> str:
    """The text of the page."""
    return HEAD + options() + names_of_others() + NAMES + "\n".join(registered()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
