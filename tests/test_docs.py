"""Links and anchors of the documentation, the generated pages, and that every public name is in the reference."""

import argparse
import ast
import functools
import re
import runpy
from pathlib import Path

import pytest

from lightning_hybrid import Hybrid3DStrategy

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "lightning_hybrid"
PAGES = sorted(DOCS.rglob("*.md"))
DIRECTIVE = re.compile(r"^::: (\S+)$", re.M)
REFERENCE = {path.stem: path.read_text() for path in sorted((DOCS / "reference").glob("*.md"))}


def run_script(name):
    return runpy.run_path(str(ROOT / ".ci" / name))


def without_code(text):
    """Markdown without fenced blocks, indented blocks and code spans."""
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.M | re.S)
    text = re.sub(r"(?<=\n\n)(?: {4}.*\n)+", "\n", text)
    return re.sub(r"(`+)[^`]+?\1", "code", text)


def links_in(text):
    """The targets of the links and images that are relative."""
    targets = re.findall(r"\]\(([^()\s]+)\)", without_code(text))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def slug(heading):
    """The anchor of a heading, as forges and the site make it."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


@functools.cache
def anchors_of(path):
    text = re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#{1,6} (.+)$", text, re.M)
    return (
        {slug(heading) for heading in headings}
        | set(DIRECTIVE.findall(text))
        | set(re.findall(r'<a id="([\w-]+)">', text))
    )


def dead_links(path, text):
    for target in links_in(text):
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            yield f"{target}: no such file"
        elif path != ROOT / "README.md" and not file.is_relative_to(DOCS):
            yield f"{target}: outside docs/, so it is dead on the site; write its path as code"
        elif anchor and anchor not in anchors_of(file):
            yield f"{target}: no such heading"


@pytest.mark.parametrize("path", [ROOT / "README.md", *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_anchors_exist(path):
    assert list(dead_links(path, path.read_text())) == []


@pytest.mark.parametrize("link", ["nothing.md", "layouts.md#nothing", "../CHANGELOG.md", "#nothing"])
def test_dead_links_are_found(link):
    code = "`[code](a.md)`,\n\n    [code](b.md)\n\n```\n[code](c.md)\n```\n"
    text = f"[one](layouts.md#ranks), [two](https://pytorch.org), {code}\n[three\nlines]({link})\n"
    assert [dead.split(":")[0] for dead in dead_links(DOCS / "index.md", text)] == [link]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nested_lists_are_indented_by_four(path):
    """Otherwise the site shows their items on the level above."""
    items = re.findall(r"^( +)(?:[-*]|\d+\.) .*$", without_code(path.read_text()), re.M)
    assert [indent for indent in items if len(indent) % 4] == []


def test_every_page_is_in_the_navigation():
    entries = re.findall(r": (\S+\.md)$", (ROOT / ".ci" / "mkdocs.yml").read_text(), re.M)
    assert sorted(entries) == sorted(str(path.relative_to(DOCS)) for path in PAGES)


def public_names():
    """Every name in an `__all__` of the package, with the module that has it."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                yield module, ast.literal_eval(node.value)


def exists(target):
    """Whether a dotted name is a module of the package, or a name that one assigns, or defines as class or function."""
    path = ROOT / (target.replace(".", "/") + ".py")
    if path.exists():
        return True
    names = set()
    for node in ast.parse(path.parent.with_suffix(".py").read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names.add(ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0]))
    return path.stem in names


def test_every_public_name_is_in_the_reference():
    documented = {target.rpartition(".")[2] for text in REFERENCE.values() for target in DIRECTIVE.findall(text)}
    prose = " ".join(REFERENCE.values())
    missing = {
        f"{module}.{name}"
        for module, names in public_names()
        for name in names
        if name not in documented and f"`{module}.{name}`" not in prose
    }
    assert missing == set()


def test_the_reference_names_what_exists():
    targets = [target for text in REFERENCE.values() for target in DIRECTIVE.findall(text)]
    assert [target for target in targets if not exists(target)] == []


def test_the_table_of_options_is_up_to_date():
    assert REFERENCE["options"] == run_script("options_table.py")["page"](), "run python .ci/options_table.py"


def test_the_page_of_exceptions_is_up_to_date():
    assert REFERENCE["exceptions"] == run_script("exceptions_page.py")["page"](), "run python .ci/exceptions_page.py"


@pytest.mark.slow
def test_the_page_of_advice_is_up_to_date():
    assert (DOCS / "advice.md").read_text() == run_script("advice_page.py")["page"](), "run python .ci/advice_page.py"


def test_each_example_of_an_option_makes_a_strategy():
    script = run_script("options_table.py")
    for options in script["notes"]()["subjects"].values():
        for name, note in options.items():
            given = script["keywords"](note["example"])
            assert name in given and note.keys() <= {"constraints", "cost", "example"}
            Hybrid3DStrategy(**given)


def test_the_command_line_page_has_every_command_and_option():
    script, text = run_script("command_line_page.py"), (DOCS / "command_line.md").read_text()
    sections = dict(re.findall(r"^<!-- help: (.+?) -->\n\n```text\n(.*?)^```$", text, re.M | re.S))
    parsers = {parser.prog: parser for parser in script["commands"](script["main_parser"]())}
    assert sections.keys() == parsers.keys(), "run python .ci/command_line_page.py"
    for name, parser in parsers.items():
        left_out = argparse._SubParsersAction, argparse._HelpAction
        actions = [action for action in parser._actions if not isinstance(action, left_out)]
        words = {word for action in actions for word in action.option_strings or [action.dest]}
        words |= {word for action in actions for word in (action.help or "").split() if word.isalpha()}
        assert words <= set(re.findall(r"[\w-]+", sections[name])), f"{name}: run python .ci/command_line_page.py"


def variables_in(path):
    """The environment variables that a file reads or sets: by `os.environ`, or as keys of a dict beside it."""
    text = path.read_text()
    if "os.environ" not in text:
        return set()
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Dict):
            found |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        elif isinstance(node, ast.Call | ast.Subscript | ast.Compare) and "os.environ" in ast.unparse(node):
            found |= {part.value for part in ast.iter_child_nodes(node) if isinstance(part, ast.Constant)}
    return {name for name in found if isinstance(name, str) and re.fullmatch(r"CXX|RANK|[A-Z]+(_[A-Z]+)+", name)}


def test_every_environment_variable_is_in_the_reference():
    found = set().union(*map(variables_in, PACKAGE.rglob("*.py")))
    assert {"CXX", "PL_SEED_WORKERS", "RANK", "TORCHINDUCTOR_COMPILE_THREADS"} <= found
    assert {name for name in found if f"`{name}`" not in REFERENCE["environment"]} == set()
