"""Switching a model's attention to "attnd" and back.

Which attention a model uses is said by its config, and configs are shared: by a model attached twice,
by models made of one config object. So each config remembers what it was set to before the first of its
workers, and gets it back after the last, in whatever order they close.
"""

from __future__ import annotations

import threading
from typing import Any

from ._calls import NAME
from ._handed import refuse


class _Set:
    """A config that is set to "attnd", and for how many workers."""

    def __init__(self, config: Any):
        self.config = config
        self.before = NAME
        self.n_workers = 0


_sets: dict[int, _Set] = {}  # by id of the config, which is kept alive while it is here
_lock = threading.Lock()


def _configs_of(model: Any) -> dict[int, Any]:
    """Every config of the model and of the models inside it."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if hasattr(config, "_attn_implementation_internal") and id(config) not in found:
            found[id(config)] = config
            for name in config.sub_configs:
                add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return found


def _path(config: Any, text: Any) -> list[str] | None:
    """The names of sub-configs that lead from config to text."""
    if config is text:
        return []
    for name in config.sub_configs:
        sub = getattr(config, name, None)
        rest = _path(sub, text) if sub is not None else None
        if rest is not None:
            return [name, *rest]
    return None


class Switch:
    """A model's text attention set to "attnd" until back(); other towers keep theirs."""

    def __init__(self, model: Any):
        self.config = model.config.get_text_config()
        before = {i: (c, c._attn_implementation) for i, c in _configs_of(model).items()}
        wanted: Any = {"": NAME}
        for name in reversed(_path(model.config, self.config) or ()):
            wanted = {name: wanted} if wanted != {"": NAME} else {name: NAME}
        self._sets: list[_Set] = []
        with _lock:
            model.set_attn_implementation(wanted)
            for i, (config, old) in before.items():
                if config._attn_implementation != NAME:
                    continue
                s = _sets.setdefault(i, _Set(config))
                if old != NAME:
                    s.before = old
                s.n_workers += 1
                self._sets.append(s)
        if self.config._attn_implementation != NAME:
            self.back()
            raise refuse(f"{type(model).__name__} does not take a registered attention")

    @property
    def now(self) -> str:
        """The attention that the model is set to; asked in every layer, past what configs look up."""
        return str(object.__getattribute__(self.config, "_attn_implementation_internal"))

    def back(self) -> None:
        """Gives up this worker's part. What a user has set meanwhile stays."""
        with _lock:
            sets, self._sets = self._sets, []
            for s in sets:
                s.n_workers -= 1
                if s.n_workers > 0:
                    continue
                del _sets[id(s.config)]
                if s.config._attn_implementation == NAME:
                    s.config._attn_implementation_internal = s.before
