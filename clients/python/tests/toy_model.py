"""A model of two layers whose text depends on every token before: for tests of serving engines."""

import numpy as np
from reference import attention

import attnd

LAYERS, Q_HEADS, KV_HEADS, DIM, BLOCK, VOCABULARY = 2, 2, 1, 8, 8, 61
WEIGHTS = np.random.default_rng(1).normal(size=(VOCABULARY, 3, LAYERS, Q_HEADS, DIM))
LOGITS = np.random.default_rng(2).normal(size=(VOCABULARY, Q_HEADS * DIM))


def qkv(ids, layer, salt):
    """[tokens, heads, DIM] each. Those of a token depend on all tokens before it, as a model's do."""
    mixed = np.cumsum(np.asarray(ids, float) * np.arange(1, len(ids) + 1)) * 0.37 + salt
    x = WEIGHTS[np.asarray(ids)][:, :, layer] + np.sin(mixed)[:, None, None, None]
    return (x[:, i, :heads].astype(np.float32) for i, heads in enumerate((Q_HEADS, KV_HEADS, KV_HEADS)))


def token_of(outs):
    return int(np.argmax(LOGITS @ np.sum(outs, 0).reshape(-1)))


def text_of(prompt, n, salt=0):
    """What the model writes, computed anew for every token."""
    ids = list(prompt)
    for _ in range(n):
        outs = [attention(q[-1:], k, v, len(ids) - 1)[0][0] for q, k, v in (qkv(ids, l, salt) for l in range(LAYERS))]
        ids.append(token_of(outs))
    return ids[len(prompt):]


def spec_of(name, n_blocks=64):
    return attnd.PoolSpec(name, LAYERS, Q_HEADS, KV_HEADS, DIM, block_tokens=BLOCK, n_blocks=n_blocks)


def prompts(n, seed, shared=0, longest=60):
    rng = np.random.default_rng(seed)
    begin = list(rng.integers(0, VOCABULARY, shared))
    return [begin + list(rng.integers(0, VOCABULARY, rng.integers(3, longest))) for _ in range(n)]
