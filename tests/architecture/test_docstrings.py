"""Docstrings of public functions that take or return tensors give shapes."""

import ast
import re
from pathlib import Path

import pytest

import lightning_hybrid

PACKAGE = Path(lightning_hybrid.__file__).parent
# A word of shapes, or axes by name: (..., rows, width) or [T, D].
SHAPE = re.compile(r"\b(shapes?|shaped|flat|scalars?)\b|\((\.{3}|\w+)(, [\w. ]+)+\)|\[[A-Z.][^]]*\]")


def public_functions(body, owner=""):
    """Public functions and methods, each with its name in the file; none of private classes, nor nested functions."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield f"{owner}{node.name}", node


def has_tensors(function):
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    annotations = [argument.annotation for argument in arguments if argument is not None] + [function.returns]
    return any(re.search(r"\bTensor\b", ast.unparse(each)) for each in annotations if each is not None)


def without_shape(source):
    """Names of public functions with tensors whose docstring gives no shape."""
    for name, function in public_functions(ast.parse(source).body):
        if has_tensors(function) and not SHAPE.search(ast.get_docstring(function) or ""):
            yield name


CHAINS = re.compile(r"\b(of which|that of|those of|of whose|so does)\b")


def test_first_lines_are_plain():
    """Subject, verb, noun: a summary names what it speaks of once more, instead of "that of"."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            summary = ((ast.get_docstring(node) if documented else None) or "").partition("\n\n")[0]
            found += [f"{path.relative_to(PACKAGE)}: {summary}"] * bool(CHAINS.search(summary))
    assert not found


def test_docstrings_of_tensors_give_shapes():
    paths = sorted(PACKAGE.rglob("*.py"))
    found = [f"{path.relative_to(PACKAGE)}: {name}" for path in paths for name in without_shape(path.read_text())]
    assert not found, "give the shapes in the docstrings of these:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("docstring", "names"),
    [
        ("Add tensors (in place).", ["A.add"]),
        ("Add tensors of any shape.", []),
        ("Add logits: (tokens, vocabulary).", []),
        ("Add rows [T, D].", []),
    ],
)
def test_missing_shapes_are_found(docstring, names):
    source = f'class A:\n    def add(self, x: Sequence[Tensor]) -> None:\n        """{docstring}"""\n'
    assert list(without_shape(source)) == names
