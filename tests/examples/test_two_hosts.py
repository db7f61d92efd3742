"""Two hosts, each a network namespace with a name and a disk of its own, train by the script for torchrun."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.launched_jobs import CLUSTER, results_of, run, start

NAMES = ("node-a", "node-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def add_hosts():
    """Two namespaces, connected by a cable; each host knows its own name by the loopback, as Debian sets up hosts."""
    for here, (name, address) in enumerate(zip(NAMES, ADDRESSES, strict=True)):
        other = 1 - here
        folder = Path("/etc/netns") / name
        folder.mkdir(parents=True, exist_ok=True)
        own, far = f"127.0.1.1 {name}\n", f"{ADDRESSES[other]} {NAMES[other]}\n"
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + own + far)
        ip("netns", "add", name)
        if here == 0:
            ip("link", "add", NAMES[0], "netns", NAMES[0], "type", "veth", "peer", "name", NAMES[1])
        else:
            ip("link", "set", name, "netns", name)
        for command in (["addr", "add", f"{address}/24", "dev", name], ["link", "set", name, "up"]):
            ip("-n", name, *command)
        ip("-n", name, "link", "set", "lo", "up")


def drop_hosts():
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
        shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@pytest.fixture
def hosts(monkeypatch, tmp_path):
    """The folder of each host, with a copy of the scripts."""
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    for name, value in {"ACCELERATOR": "cpu", "DEVICES": "2", "NODES": "2", "HEAD": NAMES[0]}.items():
        monkeypatch.setenv(name, value)
    try:
        add_hosts()
    except (OSError, subprocess.CalledProcessError) as error:
        drop_hosts()
        pytest.skip(f"no network namespaces: {error}")
    yield [Path(shutil.copytree(CLUSTER, tmp_path / name)) for name in NAMES]
    drop_hosts()


def train(folders):
    """Exit codes of both hosts, and their joint output."""
    host = ["ip", "netns", "exec"]
    script = "hostname {} && cd {} && env -u GLOO_SOCKET_IFNAME bash torchrun.sh"
    commands = [
        [*host, name, "unshare", "--uts", "bash", "-c", script.format(name, folder)]
        for name, folder in zip(NAMES, folders, strict=True)
    ]
    other = start(commands[1])
    try:
        code, output, _ = run(commands[0], timeout=300)
        more, _ = other.communicate(timeout=60)
    finally:
        if other.poll() is None:
            os.killpg(other.pid, 9)
    return (code, other.returncode), output + more


@pytest.mark.slow
def test_two_hosts_train_and_go_on_from_a_file_that_both_have(hosts):
    codes, output = train(hosts)
    assert codes == (0, 0), output
    losses = results_of(output)
    assert set(losses) == {("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")} and len(set(losses.values())) == 1
    assert "2 ranks on each of 2 nodes" in output

    for folder in hosts:
        script = folder / "train.py"
        script.write_text(script.read_text().replace("max_epochs=2", "max_epochs=4"))
    codes, output = train(hosts)  # the first rank alone has written
    assert 0 not in codes
    assert len(re.findall(r"ranks \[2, 3\] find no checkpoint, and others go on from \S+last\.ckpt", output)) == 4, (
        output
    )

    shutil.copytree(hosts[0] / "checkpoints", hosts[1] / "checkpoints")
    codes, output = train(hosts)
    assert codes == (0, 0), output
    assert float(results_of(output)["3", "1"]) < float(losses["3", "1"])
