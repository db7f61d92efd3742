"""docs/errors.md: the quoted messages are the package's, of the classes that raise them, and each has an anchor."""

import ast
import functools
import re
from pathlib import Path

import pytest

from lightning_hybrid import errors

PACKAGE = Path(errors.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "errors.md").read_text()
GAP = "\0"  # of a message: what it formats
ROW = re.compile(r'^- <a id="([\w-]+)"></a>(.+?) \(([^()]+)\): ', re.M)
CLASSES = [
    name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
]
# The module that stored the value is known, or not.
LISTED_WITH = {"StepError": {"StepError", "UncapturedOutput"}}


def template(node):
    """The text of a message in the source, with gaps; None if it has none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) if isinstance(value, ast.Constant) else GAP for value in node.values)
    if isinstance(node, ast.BinOp):
        return (template(node.left) or GAP) + (template(node.right) or GAP)
    return None


@functools.cache
def templates():
    """Every text in the package, with the names of the classes that are called with it."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if text := template(node):
                found.setdefault(text, set())
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).removesuffix(".at").split(".")[-1]
                for argument in node.args:
                    if text := template(argument):
                        found.setdefault(text, set()).add(name)
                    elif isinstance(argument, ast.IfExp):
                        for branch in (argument.body, argument.orelse):
                            found.setdefault(template(branch) or "", set()).add(name)
    return found


def quotes():
    """Anchor, quoted message and classes of each entry of the page."""
    for anchor, messages, classes in ROW.findall(PAGE):
        for quote in re.findall(r"`([^`]+)`", messages):
            yield anchor, quote, frozenset(re.findall(r"`(\w+)`", classes))


def pattern_of(quote):
    """A pattern for a text with gaps that begins with, or contains, the quote."""
    parts = [re.escape(part) for part in quote.strip(".").split("...")]
    return re.compile(f"(?s){'.*?'.join(parts)}")


def test_quotes_are_messages_of_their_classes():
    problems = []
    for anchor, quote, classes in quotes():
        pattern = pattern_of(quote)
        found = [raised for text, raised in templates().items() if pattern.search(text)]
        raised = {name for name in set().union(*found) if name.endswith("Error") or name in CLASSES}
        if not found:
            problems.append(f"errors.md#{anchor}: no message of the package has {quote!r}")
        elif raised and classes and not raised & classes:
            problems.append(f"errors.md#{anchor}: {quote!r} is raised as {sorted(raised)}")
    assert problems == []


def test_anchors_are_unique():
    anchors = re.findall(r'<a id="([\w-]+)">', PAGE)
    headings = {
        re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-") for line in re.findall(r"^#+ (.+)$", PAGE, re.M)
    }
    assert len(set(anchors)) == len(anchors) == len(ROW.findall(PAGE))
    assert not headings & set(anchors)


def test_every_error_names_its_entry():
    """Each call of a class names an entry of the page that lists the class."""
    rows = {anchor: classes for anchor, _, classes in quotes()}
    problems = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func).removesuffix(".at") if isinstance(node, ast.Call) else ""
            if name not in CLASSES:
                continue
            entries = [keyword.value for keyword in node.keywords if keyword.arg == "entry"]
            named = {
                each.value for entry in entries for each in ast.walk(entry) if isinstance(each, ast.Constant)
            } & rows.keys()
            if not named or not all(rows[anchor] & LISTED_WITH.get(name, {name}) for anchor in named):
                problems.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {name} with entry {sorted(named)}")
    assert problems == []


def test_messages_name_no_page_of_the_repository_and_entries_that_exist():
    """A wheel has errors.md alone, which explain-error prints."""
    texts = {
        path: [t for n in ast.walk(ast.parse(path.read_text())) if (t := template(n))] for path in PACKAGE.rglob("*.py")
    }
    pages = [f"{path}: {text}" for path, found in texts.items() for text in found if re.search(r"docs/\w+.*\.md", text)]
    assert [each for each in pages if "\n" not in each] == []  # docstrings are for those who read the source
    named = {name for found in texts.values() for text in found for name in re.findall(r"explain-error ([\w-]+)", text)}
    assert named - {"world-size"} <= {anchor for anchor, _, _ in ROW.findall(PAGE)}


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "HybridError"])
def test_every_class_has_an_entry(name):
    assert any(name in classes for _, _, classes in quotes())


def test_an_unknown_quote_is_found():
    assert not any(pattern_of("the sizes ... of no message").search(text) for text in templates())
    assert next(quotes())[0] == "world-size"
