"""Attention in float64, written to be obviously right."""

from __future__ import annotations

import numpy as np

import attnd


def attention(q, k, v, pos: int, layer: attnd.LayerSpec = attnd.LayerSpec(), visits=None):
    """(out, lse) of q [n, num_q_heads, dk] at positions pos.., over k, v [m, num_kv_heads, d].

    visits: for each query the positions of what it visits; None: all that it sees.
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    out = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    lse = np.full(q.shape[:2], -np.inf)
    scale = layer.scale or q.shape[2] ** -0.5
    for t in range(q.shape[0]):
        p = pos + t
        for h in range(q.shape[1]):
            j = np.arange(len(k))
            seen = np.ones(len(k), bool) if layer.is_full else j <= p
            if layer.window_tokens:
                seen &= (j > p - layer.window_tokens) | (j < layer.sink_tokens)
            if visits is not None:
                seen &= np.isin(j, visits[t])
            s = scale * (k[:, h // group] @ q[t, h])
            if layer.soft_cap:
                s = layer.soft_cap * np.tanh(s / layer.soft_cap)
            if layer.alibi_slopes is not None:
                s = s + layer.alibi_slopes[h] * (j - p)
            times = np.ones(len(k))  # how often a key counts
            if layer.branches:
                times = sum(
                    (j // w == p // w) & (j % r == h // group % r) & (p % r == h // group % r)
                    for w, r in layer.branches
                )
                seen &= times > 0
            e = times[seen] * np.exp(s[seen])
            z = e.sum()
            if layer.sink_logits is not None:
                z += np.exp(layer.sink_logits[h])
            out[t, h] = e @ v[seen, h // group] / z
            lse[t, h] = np.log(z)
    return out, lse


def random(rng, n: int, heads: int, dim: int) -> np.ndarray:
    return rng.normal(size=(n, heads, dim)).astype(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """As uint16, rounded to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)
