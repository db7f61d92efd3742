"""The command ``lightning-hybrid env``: what a bug report needs."""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from typing import Any

from lightning_hybrid.cli.command import OK, add_command, print_json
from lightning_hybrid.predict.hardware import processor_name
from lightning_hybrid.version import __version__

_PACKAGES = ("torch", "lightning", "pytorch-lightning", "torchmetrics", "jsonargparse", "numpy", "transformers")
# Variables that change how ranks start, communicate or compute. No host names, and nothing that may be a secret.
_PREFIXES = ("CUDA_", "GLOO_", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_")
_NAMES = {
    *("CXX", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "PYTHONHASHSEED", "RANK", "WORLD_SIZE"),
    *("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "SLURM_JOB_NUM_NODES", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
    *("SLURM_NTASKS_PER_NODE", "SLURM_PROCID"),
}
_SECRET = re.compile(r"AUTH|CRED|KEY|PASS|SECRET|TOKEN")

_EXAMPLE = """example:
  lightning-hybrid env --json

exit status: 0 ok; 1 torch or lightning is missing"""


def add_to(commands: Any) -> None:
    """Add the subcommand to the subparsers of argparse."""
    add_command(
        commands,
        "env",
        run,
        text="versions, processors and devices: what a bug report needs",
        description="Prints versions, processors, devices, backends, compiler, and the environment variables that"
        " change how ranks run; none that may be a secret.",
        example=_EXAMPLE,
    )


def run(parsed: argparse.Namespace) -> int:
    """Print the report, and return the exit status."""
    report = describe_environment()
    if parsed.json:
        print_json(report)
    else:
        print(_text(report))
    return OK if report["packages"]["torch"] and report["packages"]["lightning"] else 1


def describe_environment() -> dict[str, Any]:
    """Return the report as plain values; None stands for what is not there."""
    return {
        "lightning-hybrid": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "packages": {name: _version(name) for name in _PACKAGES},
        "os": platform.platform(),
        "cpu": {"model": processor_name(), "cores": os.cpu_count(), "usable cores": usable_cores()},
        "memory": {"total GiB": _gib(_total_memory()), "shared memory free GiB": _gib(_free_shared_memory())},
        **_torch_report(),
        "C++ compiler": _compiler(),
        "environment variables": environment_variables(os.environ),
    }


def environment_variables(variables: Any) -> dict[str, str]:
    """Return the variables that change how ranks run, and that cannot be secrets."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if (name in _NAMES or name.startswith(_PREFIXES)) and not _SECRET.search(name) and "@" not in value
    }


def _torch_report() -> dict[str, Any]:
    """Return devices and backends."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return {"CUDA": None, "CUDA devices": [], "NCCL": None, "gloo": None}
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    has_groups = dist.is_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_groups and dist.is_nccl_available() else None
    return {
        "CUDA": torch.version.cuda,
        "CUDA devices": [{"name": device.name, "memory GiB": _gib(device.total_memory)} for device in devices],
        "NCCL": nccl,
        "gloo": "available" if has_groups and dist.is_gloo_available() else None,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _total_memory() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return math.nan


def _free_shared_memory() -> float:
    try:
        return float(shutil.disk_usage("/dev/shm").free)
    except OSError:
        return math.nan


def _gib(count: float) -> float | None:
    return None if math.isnan(count) else round(count / 2**30, 1)


def _compiler() -> str | None:
    """Return the first line with which the compiler that torch.compile would use describes itself."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++")):
        path = shutil.which(name)
        if path is None:
            continue
        try:
            out = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        return next(iter(out.splitlines()), path)
    return None


def _text(report: dict[str, Any]) -> str:
    lines = []
    for name, value in report.items():
        if name == "packages":
            lines += [f"{package}: {version or 'not installed'}" for package, version in value.items()]
        elif name == "environment variables":
            lines.append(f"{name}:{''.join(f'{chr(10)}  {key}={one}' for key, one in value.items()) or ' none'}")
        elif isinstance(value, dict):
            lines.append(f"{name}: {', '.join(f'{key} {one}' for key, one in value.items() if one is not None)}")
        elif isinstance(value, list):
            devices = [f"{device['name']} ({device['memory GiB']} GiB)" for device in value]
            lines.append(f"{name}: {', '.join(devices) or 'none'}")
        else:
            lines.append(f"{name}: {'not available' if value is None else value}")
    return "\n".join(lines)
