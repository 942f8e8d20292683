"""Trees of tokens from Python: nodes attend as the ends of their paths, commits keep one."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import attnd
import attnd.aio

HEADS, DIM, LAYERS = 2, 16, 2
PARENTS = [-1, 0, 0, 1, 2, -1]


def spec(name: str) -> attnd.PoolSpec:
    return attnd.PoolSpec(
        name=name,
        num_layers=LAYERS,
        num_q_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim_k=DIM,
        n_blocks=64,
    )


def rows(codes: list[int], layer: int, what: int) -> np.ndarray:
    return np.stack(
        [
            np.random.default_rng([c, layer, what]).normal(size=(HEADS, DIM)).astype(np.float32)
            for c in codes
        ]
    )


def put(pool, seq, layer, pos, codes, parents=None):
    q, k, v = (rows(codes, layer, what) for what in range(3))
    return pool.step(layer, [(seq, pos, len(codes))], q, k, v, parents=parents)


def test_a_committed_path_is_as_if_it_had_come_alone(client):
    pool = client.create_pool(spec("trees"))
    prompt, nodes = list(range(1, 20)), list(range(100, 106))
    tree, plain = pool.open(), pool.open()
    for layer in range(LAYERS):
        put(pool, tree, layer, 0, prompt)
        put(pool, plain, layer, 0, prompt)
        outs = put(pool, tree, layer, 19, nodes, PARENTS).out
        alone = put(pool, plain, layer, 19, [nodes[n] for n in (0, 2, 4)]).out
        np.testing.assert_allclose(outs[[0, 2, 4]], alone, atol=2e-5)
    with pytest.raises(attnd.InvalidArgumentError, match="no path"):
        tree.commit([0, 4])
    epoch = tree.epoch
    tree.commit([0, 2, 4])
    assert tree.epoch > epoch
    for layer in range(LAYERS):
        a, b = (put(pool, s, layer, 22, [7]).out for s in (tree, plain))
        np.testing.assert_array_equal(a, b)

    calls = pool.calls()
    for layer in range(LAYERS):
        put(pool, tree, layer, 23, nodes, PARENTS)
    calls.commit(tree, [5])
    calls.commit(plain, [0])
    committed, refused = calls.run()
    assert committed is tree and isinstance(refused, attnd.InvalidArgumentError)
    for layer in range(LAYERS):
        put(pool, plain, layer, 23, [nodes[5]])
        a, b = (put(pool, s, layer, 24, [8]).out for s in (tree, plain))
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="parents has 2 elements"):
        put(pool, tree, 0, 25, [1, 2, 3], [-1, 0])


def test_trees_over_asyncio(daemon):
    async def run() -> None:
        async with await attnd.aio.connect(daemon.url) as client:
            pool = await client.create_pool(spec("trees"))
            seq = await pool.open()
            for layer in range(LAYERS):
                x = rows([1, 2, 3], layer, 0)
                await pool.step(layer, [(seq, 0, 3)], x, x, x, parents=[-1, 0, 0])
            await seq.commit([0, 2])
            x = rows([4], 0, 0)
            await pool.step(0, [(seq, 2, 1)], x, x, x)

    asyncio.run(run())
