"""The argument that a model is given its cache by: cache, and past_key_values before transformers 5.24.

From 5.24 on a model takes the old name as well, as long as the new one is not there, too.
"""

from __future__ import annotations

from typing import Any

import transformers

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
CACHE = "cache" if VERSION >= (5, 24) else "past_key_values"
_NAMES = dict.fromkeys((CACHE, "past_key_values"))


def cache_of(kwargs: dict[str, Any]) -> Any:
    """The cache among a model's arguments, or None."""
    return next((kwargs[name] for name in _NAMES if kwargs.get(name) is not None), None)


def with_cache(kwargs: dict[str, Any], cache: Any) -> dict[str, Any]:
    """The same arguments with this cache, under one name."""
    return {**{k: v for k, v in kwargs.items() if k not in _NAMES}, CACHE: cache}
