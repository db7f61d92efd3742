"""Ranks that share the first GPU: over NCCL, or over gloo by way of the host.

NCCL refuses two ranks of one host on one device, so each rank says that it is a host of its own; the ranks then talk
over sockets on loopback.
"""

import os

import torch

from harness.gloo_via_host.group import BACKEND, register

# Read by NCCL when a process makes its first communicator.
_SOCKETS = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
}


def on_one_gpu(ranks, backend=BACKEND):
    """The options of a strategy whose ranks share the first GPU; the ranks call `prepare` before they make it."""
    return {"parallel_devices": [torch.device("cuda", 0)] * ranks, "process_group_backend": backend}


def prepare(strategy):
    """On a rank whose strategy has the options of `on_one_gpu`: its share of memory, and the backend."""
    devices = strategy.get("parallel_devices", ())
    if len(devices) < 2:
        return
    if strategy["process_group_backend"] == BACKEND:
        register()
    else:
        os.environ.update(_SOCKETS, NCCL_HOSTID=os.environ["RANK"])
    torch.cuda.set_per_process_memory_fraction(1 / len(devices), devices[0])
