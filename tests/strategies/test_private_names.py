"""Private names of Lightning: all that are used are listed, and a version without one is refused at import."""

import ast
from pathlib import Path

import pytest

from lightning_hybrid.strategies import private_names
from lightning_hybrid.strategies.private_names import FABRIC, PYTORCH, check_private_names

PACKAGE = Path(private_names.__file__).parents[1]
LISTED = {name for table in (PYTORCH, FABRIC) for names in table.values() for name in names}
# Names that torch or this package have too, read of objects of theirs.
OF_OTHERS = {
    "_backward_hooks",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_is_full_backward_hook",
    "_modules",
    "_state_dict_hooks",
    "_version",
}
OF_OTHERS |= {"_computed", "_forward_cache", "_device", "_ddp_params_and_buffers_to_ignore", "_timeout"}
OF_OTHERS |= {
    "_dataloader",
    "_fabric",
    "_hparams",
    "_version",
    "_log_hyperparams",
    "_log_graph",
}


def test_the_installed_version_has_all_names():
    check_private_names()


@pytest.mark.parametrize(
    ("path", "missing"),
    [("trainer.call", "_call_gone"), ("trainer.trainer:Trainer", "_gone"), ("core.gone:Gone", "_any")],
)
def test_a_missing_name_is_named_with_the_version(monkeypatch, path, missing):
    import lightning.pytorch

    monkeypatch.setitem(PYTORCH, path, (missing,))
    with pytest.raises(ImportError, match=f"{lightning.pytorch.__version__} does not have: lightning.pytorch.{path}"):
        check_private_names()


def names_that_lightning_defines():
    import lightning

    names = set()
    for part in ("pytorch", "fabric"):
        for path in (Path(lightning.__file__).parent / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    names.add(node.name)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def private_names_used(source):
    """Attributes of other objects than `self`, imported names, and strings that are such a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning."):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def defined_here(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def test_every_private_name_that_is_used_is_listed():
    sources = [path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "private_names.py"]
    used = {name for source in sources for name in private_names_used(source)} & names_that_lightning_defines()
    unlisted = used - LISTED - OF_OTHERS - {name for source in sources for name in defined_here(source)}
    assert not unlisted, f"list {sorted(unlisted)} in strategies/private_names.py"
    assert {"_data_connector", "_call_strategy_hook", "_should_accumulate"} <= used  # the search finds some
