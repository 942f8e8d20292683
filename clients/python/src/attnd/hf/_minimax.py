"""MiniMax takes no cache but one of its own class, which also keeps the states of its linear attention."""

from __future__ import annotations

from typing import Any, TypeVar

_T = TypeVar("_T", bound=type)


def cache_class(config: Any, base: _T) -> _T:
    """base, or for MiniMax a class of both kinds: what base does is done its way."""
    if config.model_type != "minimax":
        return base
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    def get_linear_cache(self: Any, layer_idx: int) -> Any:
        return self.states.layers[layer_idx].recurrent_states[0]

    def set_linear_cache(self: Any, layer_idx: int, linear_cache: Any) -> None:
        self.states.layers[layer_idx].update_recurrent_state(linear_cache)

    states = {"get_linear_cache": get_linear_cache, "set_linear_cache": set_linear_cache}
    return type(base)(base.__name__, (base, MiniMaxCache), states)
