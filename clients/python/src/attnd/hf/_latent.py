"""Latent attention (MLA) in its absorbed form: attnd stores the latents, not the heads made of them.

Layers of DeepSeek-V2 and V3, and of models made like them, give their cache one latent per token and the
rotated part of its key, then expand both to keys and values of all heads by kv_b_proj. As q.(W_UK c) is
(W_UK^T q).c, and a sum of W_UV c is W_UV of the sum, what expands keys and values is multiplied to q and
to the output instead, here in the worker. Then all query heads attend to one KV head: K is the latent with
the rotated part behind it, V the latent in it. With attach(absorb="daemon") the daemon multiplies, with the
weights that it is given once: q and the output travel as the layer's heads.

The layer still expands its new tokens itself; nobody reads what that gives but the probe of attach(),
which compares: a layer that makes its heads otherwise keeps them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ._handed import Handed

_MAX_K, _MAX_V = 576, 512  # the daemon's
_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class Absorbed(NamedTuple):
    """What attends instead of a layer's q, k and v; of the output, [.., heads, latent], finish() makes
    that of the layer's heads. weights: [heads, nope + v_head_dim, latent] that the daemon projects with,
    so that query and output are the layer's; else None."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor  # the first elements of key
    values_of: torch.Tensor  # [heads, v_head_dim, latent]
    weights: torch.Tensor | None = None

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        if self.weights is not None:
            return out
        return torch.matmul(out.transpose(1, 2), self.values_of.transpose(1, 2)).transpose(1, 2)


def absorb(
    module: Any, query: torch.Tensor, key: Handed, value: Handed, by_daemon: bool
) -> Absorbed | None:
    """None: the layer's keys and values are not known to be expanded latents."""
    if key.is_whole or value.is_whole:  # nor expanded at all
        return None
    rank, nope, rope, dim_v = (getattr(module, name, None) for name in _SIZES)
    expand = getattr(module, "kv_b_proj", None)
    if not all(isinstance(n, int) for n in (rank, nope, rope, dim_v)) or not _is_plain(expand):
        return None
    latent, rotated = key.update.given
    heads = query.shape[1]
    if (
        latent.shape[1::2] != (1, rank)
        or rotated.shape[1::2] != (1, rope)
        or latent.dtype != rotated.dtype
        or query.shape[3] != nope + rope
        or (key.shape[1], key.shape[3], value.shape[1], value.shape[3])
        != (heads, nope + rope, heads, dim_v)
        or expand.weight.shape != (heads * (nope + dim_v), rank)
        or rank % 8
        or rope % 8
        or rank > _MAX_V
        or rank + rope > _MAX_K
    ):
        return None
    weight = expand.weight.view(heads, nope + dim_v, rank)
    whole = torch.cat((latent, rotated), dim=-1)
    if by_daemon and nope % 8 == 0 and dim_v % 8 == 0:
        return Absorbed(query, whole, whole[..., :rank], weight[:, nope:], weight)
    absorbed = torch.matmul(query[..., :nope], weight[:, :nope])
    return Absorbed(
        torch.cat((absorbed, query[..., nope:]), dim=-1),
        whole,
        whole[..., :rank],
        weight[:, nope:],
    )


def _is_plain(expand: Any) -> bool:
    """Whether it is a matrix, and that is all: no adapter, bias, quantised weight, hook or offload."""
    return (
        type(expand) is torch.nn.Linear
        and expand.bias is None
        and not expand._forward_hooks
        and not expand._forward_pre_hooks
        and "forward" not in expand.__dict__
        and expand.weight.device.type != "meta"
    )


def is_expansion(module: Any, key: Handed, value: Handed) -> bool:
    """Whether the layer has expanded its latents as absorb() takes it to."""
    latent, rotated = (x.float() for x in key.update.given)
    heads, nope = key.shape[1], module.qk_nope_head_dim
    weight = module.kv_b_proj.weight.float().view(heads, -1, latent.shape[3])
    want = torch.matmul(latent, weight.transpose(1, 2))  # [batch, heads, tokens, nope and v]
    eps = 8 * torch.finfo(key.dtype).eps
    size = max(1e-30, float(want.abs().max()))
    keys, values = key.tensor.float(), value.tensor.float()

    def is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
        return bool(((a - b).abs() <= eps * size).all())

    return (
        is_close(keys[..., :nope], want[..., :nope])
        and torch.equal(keys[..., nope:], rotated.expand(-1, heads, -1, -1))
        and is_close(values, want[..., nope:])
    )
