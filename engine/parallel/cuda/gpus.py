"""Which GPU each rank of a host computes on, and which cores are near it."""

from __future__ import annotations

import logging
import os

import torch

from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.core.numa import bind, cores_for, node_of_gpu
from kvseek.engine.parallel.nodes import check_nodes

SHARE_VARIABLE = "KVSEEK_RANKS_SHARE_GPUS"
# What PyTorch's symmetric memory and NCCL read from the environment, once, when they are first used. NVLink's multicast needs a
# service of the host that hosts with several tenants may lack, and then fails or hangs. Without the pool, memory that earlier
# ranks have been told of is never given to a later engine of the process.
ENVIRONMENT = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_SYMMMEM_IMPLICIT_POOL": "0",
    "NCCL_NVLS_ENABLE": "0",
}
# Whatever the environment says: else PyTorch's watchdog of NCCL ends the process when a rank has died, or when the communicator
# is aborted for that (PyTorch's issue 124468). watch.py ends the engine, and names the rank.
WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
SHARED_ENVIRONMENT = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
logger = logging.getLogger(__name__)


def ranks_share_gpus() -> bool:
    """Whether several ranks may compute on one GPU, which is for tests alone: they then take turns, and are slow."""
    return os.environ.get(SHARE_VARIABLE) == "1"


def gpu_of_rank(rank: int, tp_size: int, count: int, share: bool) -> int:
    """Return the number of the GPU that a rank takes among `count` that PyTorch sees.

    Raises ConfigError if there are too few, unless ranks may share them.
    """
    if count >= tp_size:
        return rank
    if share and count:
        return rank % count
    raise ConfigError(
        f"tp_size = {tp_size}: must be <= {count}, the GPUs that PyTorch sees on this host; show it more in "
        f"CUDA_VISIBLE_DEVICES, or build the engine with a smaller --tp_size"
    )


def check_gpus(config: EngineConfig, nnodes: int) -> None:
    """Raise ConfigError if an engine's ranks need GPUs that are not there, or on several hosts; for engines on the CPU, never."""
    check_nodes(config, nnodes)
    if config.device == "cuda":
        gpu_of_rank(config.tp_size - 1, config.tp_size, torch.cuda.device_count(), ranks_share_gpus())


def take_gpu(rank: int, tp_size: int) -> torch.device:
    """Choose the GPU of a rank of this host, make it the thread's current one, and bind the thread to cores near it.

    Without NUMA nodes in sysfs the ranks divide all cores that this process may use. Raises ConfigError as `gpu_of_rank`.
    """
    count, share = torch.cuda.device_count(), ranks_share_gpus()
    numbers = [gpu_of_rank(one, tp_size, count, share) for one in range(tp_size)]
    for name, value in (ENVIRONMENT | (SHARED_ENVIRONMENT if share else {})).items():
        os.environ.setdefault(name, value)
    os.environ.update(WATCHDOG)
    device = torch.device("cuda", numbers[rank])
    torch.cuda.set_device(device)
    nodes = [node_of_gpu(_bus_id(number)) for number in numbers]
    cores = cores_for(nodes, rank, os.sched_getaffinity(0))
    bind(cores)
    logger.info("rank %d computes on %s, near NUMA node %s, with %d cores", rank, device, nodes[rank], len(cores))
    return device


def ranks_on(device: torch.device, tp_size: int) -> int:
    """Return how many ranks of this host compute on a GPU: 1, unless they share GPUs."""
    count, share = torch.cuda.device_count(), ranks_share_gpus()
    return sum(gpu_of_rank(rank, tp_size, count, share) == device.index for rank in range(tp_size))


def _bus_id(number: int) -> str:
    """Return the PCI address of a GPU as sysfs writes it."""
    properties = torch.cuda.get_device_properties(number)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
