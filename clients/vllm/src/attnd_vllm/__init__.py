"""vLLM as a worker of attnd: the model runs in vLLM, K, V and attention are in the daemon.

    ATTND_VLLM=shm:///run/attnd/attnd.shm vllm serve MODEL

vLLM finds this package by its entry points; without the variable nothing of it is used. What calls
what, from vLLM's side:

    platform.py   what its platform does: turns on the rest, refuses what attnd can't do
    connector.py  the scheduler's side: what the cache has of a prompt counts as computed
    worker.py     the worker: tells attnd.serving.requests of each step before the model runs
    backend.py    the attention backend: its layers are lane.py's
    lane.py       how layers get to the daemon: over a lane, in CUDA graphs, or through host memory
    versions.py   all that differs between versions of vLLM, and between its two model runners
    identity.py   what a request's K and V depend on: its adapter and images

This worker's requests and their sequences, and what the model's weights are, are attnd.serving's.
"""

from __future__ import annotations

from . import versions
from .settings import is_on

def platform() -> str | None:
    """Entry point of vllm.platform_plugins: the platform's class; None: not wanted."""
    if not is_on():
        return None
    versions.check()
    from vllm.platforms import cpu_platform_plugin, cuda_platform_plugin

    if cpu_platform_plugin() is not None:
        return "attnd_vllm.cpu_platform.AttndCpuPlatform"
    if cuda_platform_plugin() is not None:
        return "attnd_vllm.cuda_platform.AttndCudaPlatform"
    raise RuntimeError("attnd-vllm works with vLLM for CPUs and for NVIDIA's GPUs alone")


def register() -> None:
    """Entry point of vllm.general_plugins."""
    if not is_on():
        return
    versions.check()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "attnd_vllm.backend.AttndBackend")
    if "AttndConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "AttndConnector", "attnd_vllm.connector", "AttndConnector"
        )
