"""What a user sets: two environment variables.

ATTND_SGLANG       the daemon's endpoint: shm://PATH, ipc://PATH, tcp://HOST:PORT,
                   tls+tcp://HOST:PORT; credentials are found as attnd.connect() finds them
ATTND_SGLANG_POOL  the pool's name; by default it names the model's weights, so that engines of one
                   model share a pool and those of different ones do not
"""

from __future__ import annotations

import os

TIMEOUT_S = 60.0  # of a request to the daemon: longer than a restart takes


def endpoint() -> str:
    url = os.environ.get("ATTND_SGLANG")
    if not url:
        raise ValueError("attnd-sglang: ATTND_SGLANG has to name the daemon's endpoint")
    return url


def pool_name() -> str | None:
    return os.environ.get("ATTND_SGLANG_POOL") or None
