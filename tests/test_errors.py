"""Every exception of the package that users may meet is in lightning_hybrid.errors, and is documented."""

import ast
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_hybrid import errors
from lightning_hybrid.errors import HybridError, LayoutError, OffloadError, ScheduleError, UncapturedOutput

PACKAGE = Path(errors.__file__).parent
DOCS = PACKAGE.parent / "docs"
CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__]
# Control flow inside the package: each is caught in it, and users meet at most its message.
INTERNAL = {
    "ContainerClassRegistered",
    "FullGraphNeeded",
    "NotAnMLP",
    "RanksFailed",
    "StepBroken",
    "StepUndone",
    "TrialFailed",
    "UsageError",
    "UnknownTrace",
}
# Built-in bases that code written before `HybridError` may catch.
BASES = {
    "ActivationError": ValueError,
    "BatchError": ValueError,
    "CannotShard": RuntimeError,
    "CheckpointError": RuntimeError,
    "ControlFlowError": RuntimeError,
    "FirstStepError": RuntimeError,
    "Float8Error": ValueError,
    "GlobalReadError": RuntimeError,
    "HybridError": Exception,
    "IncompleteCheckpoint": errors.CheckpointError,
    "InitialValueError": RuntimeError,
    "LayoutError": ValueError,
    "NotOnAllRanks": RuntimeError,
    "NotOnThisRank": pickle.PicklingError,
    "OffloadError": OSError,
    "BackwardStepError": ValueError,
    "PlanError": ValueError,
    "PrecisionError": ValueError,
    "PartitionError": ValueError,
    "QuantizedStatesError": ValueError,
    "RankOutOfMemory": RuntimeError,
    "RanksDiffer": RuntimeError,
    "RanksDisagree": RuntimeError,
    "RecomputeError": ValueError,
    "ScheduleError": ValueError,
    "StepChanged": errors.StepError,
    "StepError": ValueError,
    "TensorPlanError": ValueError,
    "UncapturedOutput": errors.StepError,
    "UnequalMicrobatches": RuntimeError,
    "UnfitError": errors.PartitionError,
    "UnsupportedExpertCalls": RuntimeError,
}


def exception_classes():
    """Names of the exception classes that the package defines, with their files: bases are followed by name."""
    bases, files = {}, {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).split(".")[-1] for base in node.bases}
                files[node.name] = path.relative_to(PACKAGE)
    builtin = {name for name, value in vars(__import__("builtins")).items() if _is_exception(value)}
    found = {name for name, of in bases.items() if of & (builtin | {"PicklingError"})}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return {name: files[name] for name in found}


def _is_exception(value):
    return inspect.isclass(value) and issubclass(value, BaseException) and not issubclass(value, Warning)


def test_every_public_exception_is_in_one_module():
    found = exception_classes()
    public = {name for name in found if not name.startswith("_")} - INTERNAL
    assert public == {each.__name__ for each in CLASSES}
    assert {str(found[name]) for name in public} == {"errors.py"}
    assert found.keys() >= INTERNAL


@pytest.mark.parametrize("each", CLASSES, ids=lambda each: each.__name__)
def test_classes_keep_their_bases_and_say_when_they_are_raised(each):
    assert issubclass(each, HybridError)
    assert issubclass(each, BASES[each.__name__])
    assert each.__doc__


@pytest.mark.parametrize("each", CLASSES, ids=lambda each: each.__name__)
def test_docs_have_a_section_of_each_class(each):
    page, _, anchor = each.docs.partition("#")
    text = (DOCS / page).read_text()
    anchors = re.findall(r'<a id="([\w-]+)"></a>', text)
    if each is HybridError:
        assert each.docs == "errors.md"
    else:
        assert anchors.count(anchor) == 1
        assert anchor == each.__name__.lower()


@pytest.mark.parametrize("each", CLASSES, ids=lambda each: each.__name__)
def test_pickles_keep_the_message_and_the_notes(each):
    arguments = ("blocks.1", "a message") if each is UncapturedOutput else ("a message",)
    error = each(*arguments)
    error.__notes__ = ["on rank 1"]
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is each
    assert str(copy) == "a message"
    assert copy.__notes__ == ["on rank 1"]
    assert vars(copy) == vars(error)


def test_one_class_catches_all():
    with pytest.raises(HybridError) as caught:
        raise ScheduleError.at("wrong", [["a", "b"]], {0: 1})
    assert "<-- ERROR HERE" in str(pickle.loads(pickle.dumps(caught.value)))
    assert isinstance(caught.value, ValueError)
    assert caught.value.docs == "reference/exceptions.md#scheduleerror"
    assert LayoutError.docs == "reference/exceptions.md#layouterror"


def test_an_entry_is_named_in_docs_and_note_and_kept_by_pickles():
    made = [LayoutError("m", entry="world-size"), UncapturedOutput("unit", "m", entry="world-size")]
    made += [ScheduleError.at("m", [], entry="world-size"), OffloadError("m", entry="world-size")]
    for error in made:
        for each in (error, pickle.loads(pickle.dumps(error))):
            assert (str(each), each.docs) == ("m", "errors.md#world-size")
            assert each.__notes__ == ["explained by: lightning-hybrid explain-error world-size"]


def test_errors_import_without_torch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from lightning_hybrid.errors import HybridError, StepError\n"
        "assert not any(name.startswith('lightning.') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=PACKAGE.parent)
