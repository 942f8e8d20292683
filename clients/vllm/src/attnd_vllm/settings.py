"""What a user sets: environment variables.

ATTND_VLLM       the daemon's endpoint: shm://PATH, ipc://PATH, tcp://HOST:PORT, tls+tcp://HOST:PORT;
                 credentials are found as attnd.connect() finds them. With tensor parallelism one for
                 all ranks, or one for each, by rank, with commas between them
ATTND_VLLM_POOL  the pool's name; by default it names the model's weights, so that engines of one
                 model share a pool and those of different ones do not
ATTND_VLLM_POOL_BLOCKS
                 blocks of the pool, for engines that share one: each has reserved as many of them as
                 it counts (--num-gpu-blocks-override). By default the pool is as large as that, and
                 nothing is reserved
ATTND_VLLM_ASYNC 1: on GPUs, vLLM may schedule a step before the one before it is done. Tokens that attnd
                 then can't compute, which are computed again without it, end the engine
"""

from __future__ import annotations

import os

TIMEOUT_S = 60.0  # of a request to the daemon: longer than a restart takes


def is_on() -> bool:
    return bool(os.environ.get("ATTND_VLLM"))


def endpoint(rank: int, size: int) -> str:
    """Of a worker's daemon, the worker being one of `size` ranks. Raises ValueError for endpoints that
    are neither one nor as many."""
    urls = os.environ.get("ATTND_VLLM", "").split(",")
    if len(urls) not in (1, size):
        raise ValueError(
            f"attnd-vllm: ATTND_VLLM has {len(urls)} endpoints, expected one, or one for each rank of"
            f" --tensor-parallel-size {size}"
        )
    return urls[rank if len(urls) > 1 else 0]


def pool_blocks() -> int:
    """0: as many as the engine counts."""
    text = os.environ.get("ATTND_VLLM_POOL_BLOCKS") or "0"
    if not text.isdecimal():
        raise ValueError(f"ATTND_VLLM_POOL_BLOCKS is {text!r}, not a number of blocks")
    return int(text)


def pool_name() -> str | None:
    return os.environ.get("ATTND_VLLM_POOL") or None


def is_async() -> bool:
    return os.environ.get("ATTND_VLLM_ASYNC") == "1"
