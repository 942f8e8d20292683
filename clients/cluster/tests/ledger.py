"""What was acknowledged, and what attention over it has to be.

K and V follow from token id and position alone, so that a sequence can be made anew from its ids. A
Text is a worker's view of one sequence: it appends tokens, compares every output with a float64
reference over all that was acknowledged, and is content only if each token is there exactly once.
"""

from __future__ import annotations

import numpy as np
from rig import SPEC

VOCAB = 97
H, KV, D, L = SPEC.num_q_heads, SPEC.num_kv_heads, SPEC.head_dim_k, SPEC.num_layers
_rng = np.random.default_rng(11)
_TABLE = _rng.standard_normal((L, 3, VOCAB, H, D))


def rows(layer: int, ids, first: int):
    """q, k and v of tokens at positions first, first + 1, ..."""
    ids = np.asarray(ids)
    scale = 1 + 0.1 * np.cos(np.arange(first, first + len(ids)))[:, None, None]
    q, k, v = (_TABLE[layer, i, ids % VOCAB] * scale for i in range(3))
    return [np.ascontiguousarray(x, np.float32) for x in (q, k[:, :KV], v[:, :KV])]


def reference(layer: int, ids, pos: int) -> np.ndarray:
    """float64 attention of the query at pos over tokens 0 to pos."""
    q = rows(layer, ids[pos : pos + 1], pos)[0].astype(np.float64)[0]
    _, k, v = (x.astype(np.float64) for x in rows(layer, ids[: pos + 1], 0))
    out = np.empty((H, D))
    for h in range(H):
        s = k[:, h * KV // H] @ q[h] / np.sqrt(D)
        w = np.exp(s - s.max())
        out[h] = w @ v[:, h * KV // H] / w.sum()
    return out


def rebuild(seq) -> None:
    """For connect(rebuild=): all that is known and not cached, layer after layer."""
    first = seq.n_cached
    ids = seq.tokens[first:]
    for layer in range(L):
        _, k, v = rows(layer, ids, first)
        seq.pool.step(layer, [(seq, first, len(ids))], k=k, v=v)


def next_id(ids) -> int:
    return (ids[-1] * 31 + len(ids)) % VOCAB


class Text:
    def __init__(self, pool, ids):
        self.ids = list(map(int, ids))
        self.seq = pool.open(tokens=self.ids)
        self.n_checked = 0
        first = self.seq.n_cached
        for layer in range(L):
            q, k, v = rows(layer, self.ids[first:], first)
            out = pool.step(layer, [(self.seq, first, len(self.ids) - first)], q, k, v).out
            self.check(layer, out[-1], len(self.ids) - 1)

    def check(self, layer: int, out, pos: int) -> None:
        error = np.abs(np.asarray(out, np.float64) - reference(layer, self.ids, pos)).max()
        assert error < 2e-5, f"layer {layer}, token {pos}: {error} off"
        self.n_checked += 1

    def decode(self, n: int = 1, pool=None) -> None:
        """n more tokens, each with its ids known before its layers."""
        for _ in range(n):
            pos = len(self.ids)
            id = next_id(self.ids)
            self.seq.set_tokens(pos, [id])
            self.ids.append(id)
            for layer in range(L):
                q, k, v = rows(layer, [id], pos)
                out = (pool or self.seq.pool).step(layer, [(self.seq, pos, 1)], q, k, v).out
                self.check(layer, out[0], pos)

    def verify(self) -> None:
        """All that was acknowledged is there, once."""
        pos = len(self.ids) - 1
        for layer in range(L):
            q = rows(layer, self.ids[pos:], pos)[0]
            self.check(layer, self.seq.pool.step(layer, [(self.seq, pos, 1)], q).out[0], pos)
        self.seq.adopt()
        assert self.seq.layer_len == (len(self.ids),) * L


def decode_together(pool, texts) -> None:
    """One token of each, in one step a layer."""
    at = [len(t.ids) for t in texts]
    for t, pos in zip(texts, at):
        id = next_id(t.ids)
        t.seq.set_tokens(pos, [id])
        t.ids.append(id)
    items = pool.items((t.seq, pos, 1) for t, pos in zip(texts, at))
    for layer in range(L):
        qkv = [rows(layer, t.ids[pos:], pos) for t, pos in zip(texts, at)]
        q, k, v = (np.concatenate(x) for x in zip(*qkv))
        result = pool.step(layer, items, q, k, v, lse=True)
        assert result.item_status == (0,) * len(texts) and np.isfinite(result.lse).all()
        for t, pos, out in zip(texts, at, result.out):
            t.check(layer, out, pos)
