"""The folders are the architecture: a file imports only from floors below its own (docs/architecture.md)."""

import ast
import re
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "lightning_hybrid", ROOT / "tests"
MAX_LINES, MAX_FUNCTION, MAX_STRATEGY = 500, 60, 300

# Low to high. The rooms of one floor do not import each other, except those of plain Python; nor do peers.
# Files of one floor that make one list (techniques/order.py).
TECHNIQUES = (
    *("activations", "adascale", "batch_norm", "budget", "compile", "experts", "fused_adam", "logits", "offload"),
    *("order", "recompute", "reducers", "spatial", "tensor", "tensor_plans", "zero"),
)
FLOORS = [
    {"errors", "soft_failures", "text"},
    {"layout", "version", "namespace"},
    {"schedule", "graph"},
    {"predict"},
    {"shared_memory", "patching", "optim", "host_copies"},
    {"mesh", "step", "step/objects"},
    {"randomness", "step/standins"},
    {"params/store"},
    {"collectives", "slow_links", "step/deferred_init", "step/module_state"},
    {"params", "step/tracing"},
    {"equivalence", "batch"},
    {"step/recording", "params/reads"},
    {"step/replay"},
    {"optimizers", "techniques"},
    {"pipeline/stages", "tensor/plan", "zero", "experts/moe", "memory", "replicate"},
    {"tensor", "tensor/collectives", "optimizers"},
    {"experts/parallel"},
    {"experts", "logits", "tensor/region"},
    {"sequence", "spatial"},
    {"tensor/runtime"},
    {"tensor/proof"},
    {"tensor/search"},
    {"pipeline/runtime"},
    {"pipeline"},
    {"checkpoint"},
    {"verify"},
    {"precision", "callbacks"},
    {"strategies/state"},
    {"strategies/user_code"},
    {"strategies/options"},
    {"strategies/world"},
    {"strategies/logs", "strategies/start", "techniques/slow_links"},
    {f"techniques/{name}" for name in TECHNIQUES},
    {"run"},
    {"run/description"},
    {"run/execution"},
    {"strategies"},
    {"planning"},
    {"registration"},
    {"cli", "__init__"},
    {"__main__"},
]
PEERS = {"pipeline", "tensor", "zero", "experts", "memory", "replicate"}
PURE = FLOORS[0] | FLOORS[1] | FLOORS[2] | FLOORS[3]
FRAMEWORKS = {"torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning"}
RUNNERS, RUNS_LAYOUTS = ("pipeline", "run", "strategies"), ("verify", "verification")
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning"}
MAY_IMPORT_LIGHTNING = {"strategies", "run", "techniques", "planning", "precision", "callbacks", "cli", "__init__"}
# Private words of earlier versions; the field has a word for each of them.
COINAGES = {
    *("alike", "asked", "bookkeeping", "deal", "dealing", "dealt", "dear", "heard", "held", "knock", "lend", "lent"),
    *("looks", "nobody", "noted", "rehearsal", "rehearse", "somebody", "told", "uncut", "ways", "whoever", "whole"),
}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


def sources():
    return sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def room_of(parts):
    """The room of a file or module, given as the parts of its path below the package."""
    parts = tuple(parts) or ("__init__",)
    inner = "/".join(parts[:2])
    return inner if floor_of(inner) is not None else parts[0]


def floor_of(room):
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), None)


def module_parts(path):
    """`graph/step_graph.py` -> ("step", "graph"); `step/__init__.py` -> ("step",); `__init__.py` -> ()."""
    parts = path.with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(source, path):
    """Every imported name as absolute parts, `from a import b` as a.b, since b may be a module."""
    package = ("lightning_hybrid", *path.parts[:-1])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                yield node.lineno, (*base, alias.name)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            name = next((part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)), "")
            if str(name).startswith("lightning_hybrid.") and name != "lightning_hybrid.":
                yield node.lineno, tuple(name.rstrip(".").split("."))


def violations(source, path):
    """Forbidden imports of a file on its floor, one sentence each."""
    room = room_of(module_parts(path))
    floor = floor_of(room)
    if floor is None:
        yield f"{path} is on no floor; name its room in FLOORS"
        return
    for line, (top, *rest) in imports_of(source, path):
        where = f"{path}:{line}"
        if top in FRAMEWORKS and room in PURE:
            yield f"{where}: {room} is plain Python but imports {top}"
        elif top in LIGHTNING and room.split("/")[0] not in MAY_IMPORT_LIGHTNING:
            yield f"{where}: only {', '.join(sorted(MAY_IMPORT_LIGHTNING))} may import {top}"
        elif top == "lightning_hybrid":
            # `from lightning_hybrid import X` means a room if there is one, and else a public name.
            other = room_of(rest)
            other_floor = floor_of(other)
            if other_floor is None:
                other, other_floor = "__init__", len(FLOORS) - 1
            siblings = {room, other} <= FLOORS[2] or {room, other} <= {f"techniques/{name}" for name in TECHNIQUES}
            are_peers = other != room and {other.split("/")[0], room.split("/")[0]} <= PEERS
            are_peers &= other != "tensor/collectives" and other.split("/")[0] != room.split("/")[0]
            if are_peers or (other != room and not siblings and other_floor >= floor):
                yield f"{where}: {room} (floor {floor}) imports {other} (floor {other_floor}), which is not below it"


def test_imports_point_down():
    assert not [found for path in sources() for found in violations((PACKAGE / path).read_text(), path)]


def test_file_sizes_and_names():
    num_lines = {path: len((PACKAGE / path).read_text().splitlines()) for path in sources()}
    long = {str(path): number for path, number in num_lines.items() if number > MAX_LINES}
    assert not long, f"above {MAX_LINES} lines a file holds two ideas: split it"
    vague = [str(path) for path in num_lines if VAGUE_NAMES & set(path.with_suffix("").parts)]
    assert not vague, "a name that says nothing; name the idea of the file"


def lines_of_functions(source):
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return [(function.name, function.end_lineno - function.lineno + 1) for function in functions]


def test_a_function_fits_a_screen():
    num_lines = {path: lines_of_functions((PACKAGE / path).read_text()) for path in sources()}
    long = [(str(path), *each) for path, functions in num_lines.items() for each in functions if each[1] > MAX_FUNCTION]
    assert not long, f"functions of more than {MAX_FUNCTION} lines; split them along their phases"


def test_the_strategy_only_translates_hooks():
    """The class that a user meets is read from top to bottom: options, a run, steps."""
    tree = ast.parse((PACKAGE / "strategies" / "hybrid3d.py").read_text())
    [strategy] = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert strategy.end_lineno - strategy.lineno < MAX_STRATEGY


@cache
def imports_in(path):
    return list(imports_of((PACKAGE / path).read_text(), path))


def import_graph(planted=None):
    """The files of the package by module, as parts, and which modules each imports; also for type checkers only.

    `planted` has the sources of files as they would be.
    """
    modules, planted = {module_parts(path): path for path in sources()}, planted or {}
    return {
        module: {
            next((tuple(rest[:n]) for n in (len(rest), len(rest) - 1) if tuple(rest[:n]) in modules), ())
            for _, (top, *rest) in (imports_of(planted[str(path)], path) if str(path) in planted else imports_in(path))
            if top == "lightning_hybrid"
        }
        - {(), module}
        for module, path in modules.items()
    }


def test_no_modules_import_each_other():
    graph = import_graph()
    assert sum(map(len, graph.values())) > len(graph)
    list(TopologicalSorter(graph).static_order())  # raises CycleError, with the cycle


def test_verification_knows_no_runner():
    """What a layout is compared with must not share its faults."""
    assert runners_of_the_oracle(import_graph()) == []


def runners_of_the_oracle(graph):
    """What all of `verify` but the file that runs layouts imports of the runner, itself or by other files."""
    oracle = {module for module in graph if module[:1] == ("verify",) and module not in (("verify",), RUNS_LAYOUTS)}
    assert len(oracle) > 8 and RUNS_LAYOUTS in graph
    while more := {other for module in oracle for other in graph[module]} - oracle:
        oracle |= more
    return sorted(module for module in oracle if module[0] in RUNNERS or module == RUNS_LAYOUTS)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("verify/plain.py", "from lightning_hybrid.pipeline.staged import StagedRunner"),
        ("verify/steps.py", "def late():\n    from ..run import run"),
        ("verify/record.py", "import importlib\nimportlib.import_module('lightning_hybrid.run.run')"),
        ("verify/data.py", "from lightning_hybrid.verify.verification import run_layout"),
        ("batch/split.py", "def late():\n    from lightning_hybrid.pipeline.staged import StagedRunner"),
        ("randomness/keyed.py", "from importlib import import_module\nimport_module(f'lightning_hybrid.run.{1}')"),
    ],
)
def test_runners_of_the_oracle_are_found(path, source):
    """At the top or in a function, by a statement or a call, in `verify` or in what it imports."""
    assert (PACKAGE / path).exists() and runners_of_the_oracle(import_graph({path: source}))


def names_in(source, path):
    """The words of all that a file defines: itself, classes, functions, parameters and attributes."""
    names = {path.stem}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.arg):
            names.add(node.arg)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return {name: {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)} for name in names}


def coinages_in(path):
    return [name for name, words in names_in(path.read_text(), path).items() if words & COINAGES]


def test_names_are_those_of_the_field():
    found = {str(path): coinages_in(PACKAGE / path) for path in sources()}
    assert not {path: names for path, names in found.items() if names}, "use the field's word"


def test_names_of_tests_are_those_of_the_field():
    found = {str(path.relative_to(TESTS)): coinages_in(path) for path in sorted(TESTS.rglob("*.py"))}
    assert not {path: names for path, names in found.items() if names}, "use the field's word"


def test_coinages_are_found():
    source = "class WholeAgain:\n    def run(self, is_held):\n        self._ways = is_held"
    assert sum(bool(words & COINAGES) for words in names_in(source, Path("zero/lent_parts.py")).values()) == 4


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("layout.py", "from .schedule.actions import Action"),
        ("errors.py", "from .layout import AXES"),
        ("errors.py", "import torch"),
        ("schedule/picture.py", "import torch"),
        ("graph/search.py", "from torch import nn"),
        ("graph/step_graph.py", "import torch.fx"),
        ("graph/step_graph.py", "from lightning_hybrid.step.recording.record import Recipe"),
        ("graph/partition.py", "from ..step.recording import record_step"),
        ("step/recording/recorder.py", "import lightning.pytorch"),
        ("step/recording/recorder.py", "from lightning_hybrid.pipeline.runtime.executor import run"),
        (
            "step/tracing/mode.py",
            "from lightning_hybrid.step.recording import recorder",
        ),
        ("step/recording/recorder.py", "from ..replay.stage_replay import StageReplay"),
        ("pipeline/staged.py", "from lightning_hybrid.tensor.plan import UnitPlan"),
        ("mesh.py", "from lightning_hybrid import step"),
        ("pipeline/runtime/executor.py", "from lightning_hybrid.zero import shard"),
        ("pipeline/runtime/executor.py", "from ...zero.shard import shard"),
        ("zero/shard.py", "from .. import strategies"),
        ("zero/shard.py", "def late():\n    from lightning_hybrid.checkpoint import save"),
        ("checkpoint/save.py", "from lightning_hybrid.verify import compare"),
        ("callbacks/timeline.py", "from lightning_hybrid import HybridStrategy"),
        ("strategies/hybrid.py", "from lightning_hybrid.cli import main"),
        ("misplaced.py", ""),
    ],
)
def test_wrong_imports_are_found(path, source):
    assert len(list(violations(source, Path(path)))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("layout.py", "from lightning_hybrid.errors import LayoutError"),
        ("schedule/picture.py", "import math\nfrom .actions import Action\nfrom lightning_hybrid.layout import AXES"),
        ("graph/search.py", "from lightning_hybrid.schedule import simulator\nfrom . import step_graph"),
        (
            "step/recording/recorder.py",
            "import torch\nfrom ...graph import step_graph\nfrom ...mesh import Mesh",
        ),
        (
            "pipeline/runtime/executor.py",
            "from lightning_hybrid.step.replay.stage import replay\nfrom . import transport",
        ),
        ("strategies/hybrid.py", "import lightning.pytorch\nfrom ..callbacks import timeline\nfrom .. import layout"),
        ("__init__.py", "from lightning_hybrid.strategies.hybrid import HybridStrategy\nfrom .layout import AXES"),
        ("cli/plan.py", "from lightning_hybrid.schedule import simulator"),
    ],
)
def test_right_imports_pass(path, source):
    assert not list(violations(source, Path(path)))


def test_docs_name_every_room():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.parent for path in sources() if path.name == "__init__.py"} - {Path(), Path("step")}
    assert [str(room) for room in sorted(rooms) if not re.search(rf"[`/]{room.name}[`/]", text)] == []


MIN_TESTED_LINES = 200


def rooms_with_lines():
    """Each room that has a floor, with the number of its lines."""
    lines = {}
    for path in sources():
        room = room_of(module_parts(path))
        lines[room] = lines.get(room, 0) + len((PACKAGE / path).read_text().splitlines())
    return lines


def test_every_room_has_tests():
    rooms: Counter[str] = Counter()
    for room, lines in rooms_with_lines().items():
        rooms[room.split("/")[0] if room.startswith("techniques/") else room] += lines
    folders = [TESTS / room for room, lines in rooms.items() if lines > MIN_TESTED_LINES]
    assert folders
    without = [
        f"no test file in {tests.relative_to(ROOT)}, and no {tests.parent.relative_to(ROOT)}/test_{tests.name}.py"
        for tests in folders
        if not any([*tests.glob("test_*.py"), *tests.glob("*/test_*.py"), *tests.parent.glob(f"test_{tests.name}.py")])
    ]
    assert not without
