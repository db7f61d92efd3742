"""Write docs/reference/options.md: every option of the strategy, from its signature and docstring.

python .ci/options_table.py
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "options.md"
STRATEGY = ROOT / "lightning_hybrid" / "strategies" / "hybrid3d.py"
REGISTRATION = ROOT / "lightning_hybrid" / "register_strategies_on_import.py"

HEAD = """\
# Options of the strategy

Written by `python .ci/options_table.py` from the signature and the docstring of
[`Hybrid3DStrategy`](strategy.md); a test fails if it is not up to date. Any option may be given by keyword, and
in the YAML file of a `LightningCLI` under `trainer.strategy.init_args`. [Layouts](../layouts.md): how to choose sizes.

## Options

| option | type | default | meaning |
|---|---|---|---|
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
    names = [*arguments.args[1:], *arguments.kwonlyargs]
    pairs = zip(names, [*arguments.defaults, *arguments.kw_defaults], strict=True)
    return {argument.arg: (argument.annotation, default) for argument, default in pairs}


def meanings() -> dict[str, str]:
    """The text of each argument in the docstring's `Args`, by name, in the order of the docstring."""
    section = re.search(r"^Args:\n(.*?)\n\n", ast.get_docstring(strategy_class()), re.M | re.S)[1]
    found = {}
    for entry in re.split(r"\n(?=    \S)", section):
        names, _, text = entry.strip().partition(":")
        found |= dict.fromkeys(re.split(r",\s*", names), " ".join(text.split()).replace("``", "`"))
    return found


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


def rows() -> list[str]:
    """One line of the table for each option.

    Raises:
        ValueError: An option has no text in the docstring, or the docstring describes none that exists.
    """
    options, texts = signature(), meanings()
    if unequal := options.keys() ^ texts.keys():
        raise ValueError(f"in only one of signature and docstring: {', '.join(sorted(unequal))}")
    known, lines = imported_aliases(parse(STRATEGY)), []
    for name, text in texts.items():
        annotation, default = options[name]
        types = ", ".join(f"`{kind}`" for kind in dict.fromkeys(alternatives(annotation, known)))
        lines.append(f"| `{name}` | {types} | `{in_double_quotes(default)}` | {text} |")
    assert not any(line.count("|") != 5 for line in lines), "a cell holds a vertical bar"
    return lines


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
    return HEAD + "\n".join(rows()) + "\n" + NAMES + "\n".join(registered()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
