"""The package knows no architecture: no name of one of transformers' configurations occurs in it."""

import re
from pathlib import Path

import lightning_hybrid

PACKAGE = Path(lightning_hybrid.__file__).parent
ENGLISH = {"clip"}  # gradients are clipped


def names():
    """Names of architectures as they could be spelled in code, longer than three letters."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    both = {*CONFIG_MAPPING_NAMES, *(name.removesuffix("Config") for name in CONFIG_MAPPING_NAMES.values())}
    return sorted({name.lower() for name in both if len(name) > 3} - ENGLISH)


def found_in(text, pattern):
    return sorted({hit.group().lower() for hit in pattern.finditer(text)})


def pattern():
    return re.compile(r"(?<![a-z0-9])(" + "|".join(map(re.escape, names())) + r")(?![a-z0-9])", re.IGNORECASE)


def test_no_file_of_the_package_names_an_architecture():
    words = pattern()
    found = {str(path.relative_to(PACKAGE)): found_in(path.read_text(), words) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 50
    assert not {path: hits for path, hits in found.items() if hits}


def test_a_name_would_be_found():
    assert found_in("if config.model_type == 'llama': ...  # Mixtral, gpt2_block", pattern()) == [
        "gpt2",
        "llama",
        "mixtral",
    ]
