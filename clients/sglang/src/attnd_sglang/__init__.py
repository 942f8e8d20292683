"""SGLang as a worker of attnd: the model runs in SGLang, K, V and attention are in the daemon.

    ATTND_SGLANG=shm:///run/attnd/attnd.shm python3 -m sglang.launch_server --model-path MODEL \\
        --attention-backend attnd --radix-cache-backend attnd --page-size 32 --max-total-tokens 65536

SGLang finds this package by its entry point, which adds the two names. What calls what, from
SGLang's side:

    refuse.py   what attnd can't do, by name, at the start
    backend.py  the attention backend: a pass over the model is a step, each layer a step of the pool
    cache.py    the prefix cache: what attnd has of a prompt counts as computed
    live.py     the requests that run: what they still have to tell attnd; knows nothing of SGLang

The requests' sequences are attnd.serving's.
"""

from __future__ import annotations

from typing import Any

from .refuse import keep_weights

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_UPDATES = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
SGLANG_VERSIONS = ("0.5.23",)  # those whose interfaces this package was tested with


def check_version() -> None:
    """Raises RuntimeError for an SGLang that this package does not know."""
    from importlib.metadata import version

    found = version("sglang")
    if found not in SGLANG_VERSIONS:
        raise RuntimeError(
            f"attnd-sglang knows SGLang {' or '.join(SGLANG_VERSIONS)}, this is {found}: install one"
            " of those, or leave out --attention-backend attnd --radix-cache-backend attnd"
        )


def _backend(runner: Any) -> Any:
    check_version()
    from .backend import AttndBackend

    return AttndBackend(runner)


def _cache(context: Any) -> Any:
    check_version()
    from .cache import AttndCache

    return AttndCache(context)


def register() -> None:
    """Entry point of sglang.srt.plugins. What SGLang it is, is looked at when it is used."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices(["attnd"])
    register_attention_backend("attnd")(_backend)
    register_radix_cache_backend("attnd", _cache)
    for update in _UPDATES:
        HookRegistry.register(f"{_UPDATER}.{update}", keep_weights, HookType.AROUND)
