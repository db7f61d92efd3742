"""Keywords of Lightning's strategies, FSDP, accelerate and DeepSpeed: each is refused with what to set here."""

import inspect
import re

import pytest
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.strategies.hybrid3d import OPTION_DEFAULTS
from lightning_hybrid.strategies.options.foreign import ADVICE

NAMES = {name for advice in ADVICE.values() for name in advice}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stage": 3}, r"stage=3 is a keyword of DeepSpeed: set zero_stage to the same number"),
        (
            {"stage": 3, "offload_optimizer": True},
            r"set zero_stage to the same number.*; offload_optimizer=True is a keyword of",
        ),
        ({"sharding_strategy": "FULL_SHARD"}, r"sharding_strategy='FULL_SHARD' is a keyword of FSDP: set zero_stage=3"),
        ({"fsdp_offload_params": True}, r"fsdp_offload_params=True is a keyword of accelerate: set offload='cpu'"),
        ({"find_unused_parameters": False}, r"find_unused_parameters=False is a keyword of DDP: leave it out"),
        (
            {"config": {str(n): n for n in range(999)}},
            r"config=\{.{1,99}\.\.\.\} is a keyword of DeepSpeed: run `lightning-hybrid migrate",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_keyword_is_refused_with_its_library_and_what_to_set(given, message):
    with pytest.raises(ValueError, match=message):
        Hybrid3DStrategy(**given)


def test_every_keyword_is_of_one_library_and_no_option():
    assert len(NAMES) == sum(map(len, ADVICE.values())) and not NAMES & OPTION_DEFAULTS.keys()
    options = set(
        re.findall(r"(?<![\w.(])(\w+)=", " ".join(text for advice in ADVICE.values() for text in advice.values()))
    )
    options -= {"accelerator", "devices", "rank", "start_step", "scaler", "reduce_dtype", "gather_dtype"}
    assert options <= OPTION_DEFAULTS.keys() | NAMES


# FSDPStrategy passes further keywords on to torch's class.
KINDS = [DDPStrategy, FSDPStrategy, FullyShardedDataParallel, DeepSpeedStrategy, ModelParallelStrategy]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_keyword_of_lightning_has_an_answer(kind):
    keywords = {p.name for p in inspect.signature(kind).parameters.values() if p.kind != p.VAR_KEYWORD}
    assert keywords - OPTION_DEFAULTS.keys() - NAMES - {"module"} == set()


def test_every_key_of_a_file_of_accelerate_has_an_answer():
    launch = pytest.importorskip("accelerate.commands.launch")
    parser = launch.launch_command_parser()
    keys = {action.dest for action in parser._actions if action.dest.startswith("fsdp_")}
    assert len(keys) > 10 and keys <= NAMES


@pytest.mark.parametrize(
    ("name", "nearest"), [("tensor_paralel_size", "; did you mean 'tensor_parallel_size'\\?$"), ("qq", "$")]
)
def test_unknown_keywords(name, nearest):
    with pytest.raises(TypeError, match=f"no option '{name}'{nearest}"):
        Hybrid3DStrategy(**{name: 2})


@pytest.mark.parametrize(
    ("name", "own"), [("pp", "pipeline_parallel_size"), ("dp", "data_parallel_size"), ("zero", "zero_stage")]
)
def test_short_names(name, own):
    with pytest.raises(TypeError, match=f"no option '{name}'; set {own}=2$"):
        Hybrid3DStrategy(**{name: 2})


@pytest.mark.parametrize(
    ("written", "meant"),
    [("1F1B", "1f1b"), ("GPipe", "gpipe"), ("Interleaved1F1B", "interleaved_1f1b"), ("DualPipeV", "dualpipe_v")],
)
def test_schedules_as_in_papers(written, meant):
    stages = 2 if meant in ("interleaved_1f1b", "dualpipe_v") else 1
    strategy = Hybrid3DStrategy(pipeline_parallel_size=2, stages_per_rank=stages, schedule=written)
    assert strategy.options.schedule == meant
    with pytest.raises(ValueError, match="schedule='2F2B' is unknown; use one of gpipe, 1f1b"):
        Hybrid3DStrategy(schedule="2F2B")


@pytest.mark.parametrize(
    ("given", "option", "value"),
    [
        ({"compile": True}, "compile", "units"),
        ({"compile": False}, "compile", None),
        ({"reshard_after_forward": None}, "reshard_after_forward", True),
    ],
)
def test_two_spellings_of_a_value(given, option, value):
    assert getattr(Hybrid3DStrategy(**given).options, option) == value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"offload": True}, "offload=True; use 'cpu', 'disk:PATH'"),
        ({"offload": ["gradients"]}, r"offload=\['gradients'\]; use 'cpu', 'disk:PATH'"),
        ({"offload": {"parameters": "cpu"}}, "set zero_stage=3, or leave 'parameters' out"),
        ({"offload": {"gradients": "cpu"}}, "set zero_stage=1, 2 or 3, or leave 'gradients' out"),
        ({"reshard_after_forward": 4}, "reshard_after_forward=4: .*set shard_size=4"),
        ({"reshard_after_forward": 0}, "reshard_after_forward=0: .*set shard_size=0"),
    ],
)
def test_values_of_other_libraries(given, message):
    with pytest.raises(ValueError, match=message):
        Hybrid3DStrategy(**given)
