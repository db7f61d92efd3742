"""The scripts for torchrun and SLURM start two nodes on this machine, and the documentation quotes them."""

import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from harness.launched_jobs import CLUSTER, results_of, run, start

ROOT = Path(__file__).parents[2]

# What `srun` does with one task per device: the variables that it sets for each are those of SLURM's manual.
SRUN = """
    #!{python}
    import os, subprocess, sys

    nodes, per_node = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
    tasks = []
    for rank in range(nodes * per_node):
        ids = {{"PROCID": rank, "NODEID": rank // per_node, "LOCALID": rank % per_node, "NTASKS": nodes * per_node}}
        task = {{f"SLURM_{{name}}": str(value) for name, value in ids.items()}}
        tasks.append(subprocess.Popen(sys.argv[1:], env={{**os.environ, **task}}))
    sys.exit(max([task.wait() for task in tasks]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the scripts, which is the current folder."""
    for path in CLUSTER.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.chdir(tmp_path)
    # `python` and `torchrun` are those of this environment.
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("ACCELERATOR", "cpu")
    return tmp_path


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sh"])
def test_a_script_is_bash_and_is_quoted_in_the_documentation(name):
    assert subprocess.run(["bash", "-n", CLUSTER / name], capture_output=True, text=True).stderr == ""
    page = (ROOT / "docs" / "howto" / "slurm_and_torchrun.md").read_text()
    assert f"```bash\n{(CLUSTER / name).read_text()}```" in page


def test_the_python_script_is_quoted_in_the_documentation():
    page = (ROOT / "docs" / "howto" / "slurm_and_torchrun.md").read_text()
    script = (CLUSTER / "train.py").read_text().split('"""\n\n', 1)[1]
    assert f"```python\n# train.py\n{script}```" in page


@pytest.mark.slow
def test_torchrun_script_trains_on_two_nodes(folder, monkeypatch):
    for name, value in {"NODES": "2", "DEVICES": "1", "HEAD": "127.0.0.1", "PORT": free_port()}.items():
        monkeypatch.setenv(name, value)
    other = start(["bash", "torchrun.sh"])
    try:
        code, output, _ = run(["bash", "torchrun.sh"], timeout=300)
        more, _ = other.communicate(timeout=60)
    finally:
        if other.poll() is None:
            os.killpg(other.pid, 9)
    assert (code, other.returncode) == (0, 0), output + more
    losses = results_of(output + more)
    assert set(losses) == {("0", "0"), ("1", "1")} and len(set(losses.values())) == 1
    assert (folder / "checkpoints" / "last.ckpt").exists()


@pytest.mark.slow
def test_slurm_script_trains_on_two_nodes_and_goes_on_from_its_checkpoint(folder):
    srun = folder / "srun"
    srun.write_text(textwrap.dedent(SRUN).lstrip().format(python=sys.executable))
    srun.chmod(0o755)
    # What sbatch sets for the script, by its #SBATCH lines; one task on each node here.
    job = {"JOB_ID": "17", "JOB_NAME": "slurm.sh", "NNODES": "2", "NTASKS_PER_NODE": "1", "CPUS_PER_TASK": "1"}
    variables = {f"SLURM_{name}": value for name, value in job.items()}
    variables |= {"SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": free_port()}
    assert {"SLURM_" + name for name in re.findall(r"\$SLURM_(\w+)", (folder / "slurm.sh").read_text())} <= {*variables}
    command = ["env", *(f"{name}={value}" for name, value in variables.items()), "bash", "slurm.sh"]
    code, output, _ = run(command, timeout=300)
    assert code == 0, output
    losses = results_of(output)
    assert set(losses) == {("0", "0"), ("1", "1")} and len(set(losses.values())) == 1
    script = folder / "train.py"
    script.write_text(script.read_text().replace("max_epochs=2", "max_epochs=4"))
    code, output, _ = run(command, timeout=300)
    assert code == 0 and "Restored all states from the checkpoint" in output, output
    assert float(results_of(output)["0", "0"]) < float(losses["0", "0"])
