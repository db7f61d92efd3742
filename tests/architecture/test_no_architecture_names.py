"""The package knows no architecture: no name of one of transformers' configurations occurs in it."""

import re
from importlib.util import find_spec
from pathlib import Path

import lightning_hybrid

PACKAGE = Path(lightning_hybrid.__file__).parent
ENGLISH = {"clip"}  # gradients are clipped


def names():
    """Names of architectures as they could be spelled in code, longer than three letters."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    # Read, not imported: that takes seconds. The entries are written ("name", "NameConfig") or "name": "NameConfig".
    tables = Path(spec.origin).parent.joinpath("models", "auto").glob("*.py")
    entry = re.compile(r'"([\w.-]+)"[,:] "(?!Auto)(\w+)Config"')
    pairs = [pair for table in tables for pair in entry.findall(table.read_text())]
    found = sorted({name.lower() for pair in pairs for name in pair if len(name) > 3} - ENGLISH)
    assert len(found) > 500, "the tables are written in another way"
    return found


def found_in(text, names):
    text = text.lower()
    # One pattern of a thousand names would take seconds.
    inside = [name for name in names if name in text]
    return [name for name in inside if re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", text)]


def test_package_names_no_architecture():
    words = names()
    found = {str(path.relative_to(PACKAGE)): found_in(path.read_text(), words) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 50
    assert not {path: hits for path, hits in found.items() if hits}


def test_architecture_names_are_found():
    assert found_in("if config.model_type == 'llama': ...  # Mixtral, gpt2_block", names()) == [
        "gpt2",
        "llama",
        "mixtral",
    ]
