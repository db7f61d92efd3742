"""Private names of Lightning and torch: all that are used are listed; a version without one is refused at import."""

import ast
import re
from pathlib import Path

import pytest
import torch

from lightning_hybrid.strategies import private_names
from lightning_hybrid.strategies.private_names import FABRIC, PYTORCH, TORCH, check_private_names

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


def test_a_missing_name_of_torch_is_named_with_the_version(monkeypatch):
    monkeypatch.setitem(TORCH, "overrides", ("_gone",))
    with pytest.raises(ImportError, match=f"torch {re.escape(torch.__version__)} does not have: torch.overrides._gone"):
        check_private_names()


def private_names_of_torch(source):
    """Private names that are read of what the source imports from torch; an import that fails names them itself."""
    tree, imported = ast.parse(source), {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            imported.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        elif isinstance(node, ast.Import):
            names = (alias for alias in node.names if alias.asname and alias.name.startswith("torch."))
            imported.update({alias.asname: alias.name for alias in names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            owner = ast.unparse(node.value).split(".")
            if owner[0] in imported:
                yield ".".join([imported[owner[0]], *owner[1:], node.attr])


# Of modules that are loaded when a run compiles, and operators, which torch finds when they are called.
LATE = ("torch._dynamo", "torch._inductor", "torch.ops.")
# Modules that `import torch` loads; their names are public.
MODULES = {"torch._ops", "torch.utils._pytree", "torch.distributed._functional_collectives"}
MODULES |= {"torch._C._autograd", "torch._C._nn", "torch._C"}


def test_every_private_name_of_torch_that_is_read_is_listed():
    listed = {name for names in TORCH.values() for name in names}
    read = {name for path in PACKAGE.rglob("*.py") for name in private_names_of_torch(path.read_text())} - MODULES
    unlisted = {name for name in read if name.rpartition(".")[2] not in listed and not name.startswith(LATE)}
    assert not unlisted, f"list {sorted(unlisted)} in strategies/private_names.py"
    assert "torch._C._swap_tensor_impl" in read  # the search finds some
