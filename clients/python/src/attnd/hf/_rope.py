"""Rotary frequencies that depend on how long a pass's text is: of the rope types longrope and dynamic.

transformers' modules with such frequencies set them in each pass, from the last position that it has in
any row. So the tokens of one text are rotated by others than the same tokens of a longer one.
"""

from __future__ import annotations

from typing import Any

# Ends of names of what such a module sets in a pass.
_PER_PASS = ("inv_freq", "max_seq_len_cached", "attention_scaling")


def _types_of(module: Any) -> dict[Any, str]:
    """The rope types of a module, by layer type where it has several."""
    kinds = getattr(module, "rope_type", None)
    return kinds if isinstance(kinds, dict) else {None: kinds} if isinstance(kinds, str) else {}


def is_per_pass(module: Any) -> bool:
    return any(kind == "longrope" or "dynamic" in kind for kind in _types_of(module).values())


def of_all_passes(state: dict[str, Any]) -> dict[str, Any]:
    """Of such a module's state, what no pass sets."""
    return {
        name: value
        for name, value in state.items()
        if not name.endswith(_PER_PASS) or "original" in name
    }


class Rope:
    """Of a model.

    limits    the longest texts with the short frequencies, of longrope
    n_scaled  from so many tokens on, the frequencies depend on what was computed before; None: never
    """

    def __init__(self, model: Any):
        limits: set[int] = set()
        scaled: list[int] = []
        for module in model.modules():
            for layer_type, kind in _types_of(module).items():
                if kind == "longrope":
                    limits.update(_limits_of(module, layer_type))
                elif "dynamic" in kind:
                    scaled.append(int(module.original_max_seq_len))
        self.limits = sorted(limits)
        self.n_scaled = min(scaled, default=None)

    @property
    def is_fixed(self) -> bool:
        return not self.limits and self.n_scaled is None

    def state(self, n_tokens: int) -> int | None:
        """Which frequencies a pass sets up to the n_tokens-th token; None: not known from that."""
        if self.n_scaled is not None and n_tokens >= self.n_scaled:
            return None
        return sum(n_tokens > limit for limit in self.limits)


def _limits_of(module: Any, layer_type: Any) -> list[int]:
    config = module.config
    rope = getattr(config, "rope_parameters", None) or {}
    if layer_type is not None:
        rope = rope.get(layer_type) or {}
    given = (
        rope.get("original_max_position_embeddings"),
        getattr(config, "original_max_position_embeddings", None),
    )
    return [int(n) for n in given if n]
