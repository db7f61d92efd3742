"""Classes by their paths, their arguments as LightningCLI reads them, scripts, and config files."""

import pickle
import subprocess
import sys

import pytest
import torch

from lightning_hybrid.cli import main
from lightning_hybrid.cli.classes import ConfiguredRun, load_target, split_class_flags
from lightning_hybrid.cli.command import UsageError
from lightning_hybrid.cli.module import layout_of, trainer_config

CLASSES = "tests/models/command_line_classes.py"
SCRIPT = "tests/models/command_line_script.py"
CONFIG = """
seed_everything: 7
trainer:
  devices: 4
  precision: bf16-mixed
  accumulate_grad_batches: 2
  max_epochs: 3
  callbacks: [{class_path: lightning.pytorch.callbacks.LearningRateMonitor}]
  strategy:
    class_path: lightning_hybrid.Hybrid3DStrategy
    init_args: {pipeline_parallel_size: 2, num_microbatches: 4}
model:
  class_path: models.command_line_classes.Stack
  init_args: {num_layers: 2, flag: false}
data:
  class_path: models.command_line_classes.Data
  init_args: {batch_size: 4, options: {sizes: [1, 2]}}
optimizer:
  class_path: torch.optim.SGD
  init_args: {lr: 0.25}
ckpt_path: null
"""


pytestmark = pytest.mark.filterwarnings("ignore:.*configure_optimizers. will be overridden:UserWarning")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return f"--config={path}"


def made(module, data=None, *flags):
    run = ConfiguredRun(module, data, split_class_flags(flags)[1])
    return run.make_module(), run.make_data()


def test_class_flags_may_stand_anywhere():
    line = ["verify", "--module.depth", "-3", "x:Y", "--data.flag=false", "--json", "--module.rate=1e-3"]
    line += ["--optimizer", "SGD", "--trainer.callbacks+=X", "--config", "c.yaml"]
    others, flags = split_class_flags(line)
    assert others == ["verify", "x:Y", "--json", "--config", "c.yaml"]
    assert flags == [
        *("--model.depth=-3", "--data.flag=false", "--model.rate=1e-3", "--optimizer=SGD", "--trainer.callbacks+=X")
    ]


@pytest.mark.parametrize("path", ["fractions:Fraction", "fractions.Fraction"])
def test_target_by_module(path):
    assert load_target(path)(3) == 3


def test_flags_follow_the_type_hints_of_the_class():
    module, data = made(f"{CLASSES}:Stack", None, "--module.flag", "false", "--module.name", "null")
    assert data is None and (module.flag, module.name, len(module.layers)) == (False, None, 4)
    module, _ = made(f"{CLASSES}:Stack", None, "--module.name", "3", "--module.num_layers", "3")
    assert (module.name, len(module.layers)) == ("3", 3)


def test_data_by_class_and_by_function():
    _, data = made(f"{CLASSES}:Stack", f"{CLASSES}:Data", "--data.options.sizes", "3")
    assert data.options == {"sizes": 3}
    flags = ("--data.options", "{sizes: [1, 2]}", "--data.batch_size", "4")
    _, data = made(f"{CLASSES}:Stack", f"{CLASSES}:Data", *flags)
    assert (data.batch_size, data.options) == (4, {"sizes": [1, 2]})
    _, data = made(f"{CLASSES}:Stack", f"{CLASSES}:make_loader", "--data.batch_size", "4")
    assert isinstance(data, torch.utils.data.DataLoader) and data.batch_size == 4


def test_config_names_classes_layout_and_trainer(config):
    run = ConfiguredRun(None, None, [config, "--model.num_layers=3"])
    module, data = run.make_module(), run.make_data()
    assert (type(module).__name__, len(module.layers), module.flag) == ("Stack", 3, False)
    assert (data.batch_size, data.options) == (4, {"sizes": [1, 2]})
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, torch.optim.SGD) and optimizer.param_groups[0]["lr"] == 0.25
    said = trainer_config(run.parse())
    assert (said.layout.name, said.layout.devices, said.layout.replicas) == ("dp=2,pp=2,m=4", 4, 2)
    assert (said.seed, said.precision, said.unused) == (7, "bf16-mixed", ("callbacks",))
    assert said.arguments == {"accumulate_grad_batches": 2}


@pytest.mark.parametrize(
    "strategy",
    [
        "hybrid3d_zero3",
        "{class_path: lightning_hybrid.Hybrid3DStrategy, init_args: {zero_stage: 3}}",
    ],
)
def test_class_of_the_line_with_a_config_of_its_arguments(strategy, tmp_path):
    (tmp_path / "config.yaml").write_text(f"model: {{num_layers: 2}}\ntrainer: {{strategy: {strategy}, devices: 2}}\n")
    run = ConfiguredRun(f"{CLASSES}:Stack", None, [f"--config={tmp_path / 'config.yaml'}"])
    assert len(run.make_module().layers) == 2
    layout = trainer_config(run.parse()).layout
    assert layout.devices == 2 and layout.strategy == {"zero_stage": 3}


def test_script_keeps_the_links_of_its_command_line():
    run = ConfiguredRun(SCRIPT, None, ["--data.batch_size=4"])
    module, data = run.make_module(), run.make_data()
    assert (len(module.layers), data.batch_size) == (4, 4)
    assert trainer_config(run.parse()).layout is None


def test_another_process_can_make_them(config):
    run = pickle.loads(pickle.dumps(ConfiguredRun(None, None, [config]).make_module)).__self__
    assert len(run.make_module().layers) == 2 and run.make_data().batch_size == 4


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        ("{devices: 2, strategy: {class_path: lightning_hybrid.Hybrid3DStrategy, %s}}", "multiple of 3"),
        ("{strategy: {class_path: models.command_line_classes.OwnStrategy, %s}}", "--layout"),
    ],
)
def test_layouts_of_a_config_that_are_refused(trainer, text, tmp_path, capsys):
    trainer %= "init_args: {pipeline_parallel_size: 3}"
    (tmp_path / "config.yaml").write_text(f"trainer: {trainer}\n")
    line = ["explain", f"{CLASSES}:Stack", "--config", str(tmp_path / "config.yaml")]
    assert main(line) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["x:Y", "--modul.width", "8"], "x:Y"),
        ([f"{CLASSES}:Stack", "--modul.width", "8"], "--modul.width"),
        (["nothing"], "names no class"),
        ([], "--config"),
        (["no_such_module:Y"], "no_such_module"),
        ([f"{CLASSES}:Stak"], "did you mean 'Stack'?"),
        (["examples/missing.py:X"], "there is no file"),
        (["examples/missing.py"], "there is no file"),
        ([CLASSES], "calls no LightningCLI"),
        ([SCRIPT, "--data", "x:Y"], "names its data itself"),
        ([f"{CLASSES}:Stack", "--module.nun_layers", "2"], "did you mean '--module.num_layers'?"),
        ([f"{CLASSES}:Stack", "--module.num_layers", "two"], "model.num_layers"),
        ([f"{CLASSES}:Stack", "--module.num_layers"], "expected one argument"),
        ([f"{CLASSES}:Stack", "--data.a", "1"], "without --data"),
        ([f"{CLASSES}:Stack", "--config", "missing.yaml"], "missing.yaml"),
        ([f"{CLASSES}:Stack", "--layout", "pp"], "name=value"),
        ([f"{CLASSES}:Stack", "--layout", "xx=2"], "the strategy has no option 'xx'"),
        ([f"{CLASSES}:Stack", "--layout", "zero_stag=2"], "did you mean 'zero_stage'?"),
        ([f"{CLASSES}:Stack", "--layout", "dp=2,stage=3"], "stage=3 is a keyword of DeepSpeed: set zero_stage"),
        ([f"{CLASSES}:Stack", "--layout", "schedule=none"], "schedule='none' is unknown"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "explain"])
def test_invalid_command_lines(command, arguments, text, capsys):
    assert main([command, *arguments]) == 2
    assert text in capsys.readouterr().err


LAYOUT_TYPOS = [
    ("tp=2,fsdp=2", "fsdp=2 is a keyword of accelerate: set data_parallel_size to the number of ranks, and zero_stage"),
    ("tp=2,zer=3", "no option 'zer'"),
    ("tp=x", "sizes must be whole numbers"),
]


@pytest.mark.parametrize(("layout", "text"), LAYOUT_TYPOS)
@pytest.mark.parametrize("command", ["verify", "explain", "dryrun"])
def test_typos_of_a_layout_are_found_before_torch_is_imported(command, layout, text):
    code = (
        "import sys, lightning_hybrid.cli as cli; status = cli.main(sys.argv[1:]);"
        " sys.exit(9 if 'torch' in sys.modules else status)"
    )
    command = [sys.executable, "-c", code, command, "no_such_module:Net", "--layout", layout]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and text in ended.stderr, ended.stderr


def test_errors_of_imported_code_are_raised(tmp_path):
    (tmp_path / "imports_what_is_missing.py").write_text("import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        main(["explain", f"{tmp_path}/imports_what_is_missing.py:Net"])
    (tmp_path / "raises_when_imported.py").write_text("raise ValueError('the user\\'s own')\n")
    for target in (f"{tmp_path}/raises_when_imported.py:Net", f"{tmp_path}/raises_when_imported.py"):
        with pytest.raises(ValueError, match="the user's own"):
            main(["verify", target])


def test_derived_lightning_modules_alone_are_modules():
    with pytest.raises(TypeError, match="no LightningModule"):
        ConfiguredRun("collections:OrderedDict", None, []).parse()


def test_an_unknown_class_in_a_config(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {class_path: models.command_line_classes.Stak}\n")
    with pytest.raises(UsageError, match=r"did you mean .Stack."):
        ConfiguredRun(None, None, [f"--config={tmp_path / 'config.yaml'}"]).parse()


@pytest.mark.parametrize("arguments", [["env", "--module.a", "1"], ["env", "--nothing"], ["env", "word"]])
def test_other_commands_take_no_arguments_of_classes(arguments, capsys):
    assert main(arguments) == 2
    assert "unknown argument" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("lightning-hybrid ")


@pytest.mark.world(1)
def test_layouts_refuse_names_of_other_libraries():
    with pytest.raises(UsageError, match="tp_size=2 is a keyword of accelerate: set tensor_parallel_size"):
        layout_of("tp_size=2,dp=2", None)
