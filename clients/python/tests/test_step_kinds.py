"""Steps that say more of what queries see: sparse ones, each query of which visits what its row of
indices names; trees, whose nodes attend as the ends of their paths and of which a commit keeps one;
and those of parts of longer sequences, whose outputs merged by lse are those of the whole."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest
import reference
from conftest import Kept, worker_of

import attnd
import attnd.aio

HEADS, DIM, CACHED, NEW = 4, 32, 150, 3
GEOMETRIES = {
    "mha": dict(num_q_heads=HEADS, num_kv_heads=HEADS, head_dim_k=DIM, head_dim_v=DIM),
    "gqa": dict(num_q_heads=HEADS, num_kv_heads=2, head_dim_k=DIM, head_dim_v=DIM),
    "latent": dict(num_q_heads=8, num_kv_heads=1, head_dim_k=96, head_dim_v=64, is_v_in_k=True),
}


def spec(name: str, kind: str, block_tokens: int, **layer) -> attnd.PoolSpec:
    return attnd.PoolSpec(
        name=f"sparse-{name}-{kind}-{block_tokens}",
        num_layers=1,
        n_blocks=2048 // block_tokens,
        block_tokens=block_tokens,
        layers=[attnd.LayerSpec(**layer)] if layer else [],
        **GEOMETRIES[kind],
    )


def tensors(s: attnd.PoolSpec, n: int, seed: int = 0):
    """q, k and v (None where it is in k) of n tokens; and v for the reference."""
    rng = np.random.default_rng(seed)
    q = reference.random(rng, n, s.num_q_heads, s.head_dim_k)
    k = reference.random(rng, n, s.num_kv_heads, s.head_dim_k)
    if s.is_v_in_k:
        return q, k, None, np.ascontiguousarray(k[:, :, : s.head_dim_v])
    v = reference.random(rng, n, s.num_kv_heads, s.head_dim_v)
    return q, k, v, v


def cut(x, a: int, b: int):
    return None if x is None else np.ascontiguousarray(x[a:b])


def filled(pool, s: attnd.PoolSpec, seed: int = 0):
    """A sequence of CACHED tokens, and the tensors of those and NEW more."""
    q, k, v, v_ref = tensors(s, CACHED + NEW, seed)
    seq = pool.open()
    pool.step(0, [(seq, 0, CACHED)], k=cut(k, 0, CACHED), v=cut(v, 0, CACHED))
    new = [cut(x, CACHED, CACHED + NEW) for x in (q, k, v)]
    return seq, new, k, v_ref


@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize("kind", GEOMETRIES)
def test_top_k_is_what_the_reference_gives(client, kind, block_tokens):
    s = spec("topk", kind, block_tokens, soft_cap=4.0)
    pool = client.create_pool(s)
    seq, (q, k, v), all_k, all_v = filled(pool, s)
    rng = np.random.default_rng(1)
    indices = np.full((NEW, 40), -1, np.int32)
    for t in range(NEW):
        n = 40 - 7 * t
        indices[t, :n] = rng.permutation(CACHED + t)[:n]
        indices[t, 0] = CACHED + t  # itself, of this step
    r = pool.step(0, [(seq, CACHED, NEW)], q, k, v, indices=indices, lse=True)
    out, lse = reference.attention(q, all_k, all_v, CACHED, s.layers[0], visits=indices)
    np.testing.assert_allclose(r.out, out, atol=2e-5)
    np.testing.assert_allclose(r.lse, lse, atol=2e-5)


@pytest.mark.parametrize("kind", GEOMETRIES)
def test_all_of_them_is_dense(client, kind):
    s = spec("full", kind, 16)
    pool = client.create_pool(s)
    seq, (q, k, v), _, _ = filled(pool, s)
    dense = pool.step(0, [(seq, CACHED, NEW)], q, k, v).out
    by_token = np.tile(np.arange(CACHED + NEW, dtype=np.int32), (NEW, 1))
    by_token[by_token > CACHED + np.arange(NEW)[:, None]] = -1
    blocks = np.tile(np.arange(10, dtype=np.int32)[::-1], (NEW, 1))
    for options in (
        {"indices": by_token},
        {"indices": np.ascontiguousarray(blocks), "index_tokens": 16},
    ):
        out = pool.step(0, [(seq, CACHED, NEW)], q, **options).out
        np.testing.assert_allclose(out, dense, atol=2e-5)


@pytest.mark.parametrize("kind", GEOMETRIES)
def test_chosen_blocks_are_those_of_the_highest_bounds(client, kind):
    s = spec("chosen", kind, 16)
    pool = client.create_pool(s)
    seq, (q, k, v), all_k, all_v = filled(pool, s)
    items = [(seq, CACHED, NEW)]
    dense = pool.step(0, items, q, k, v).out
    np.testing.assert_array_equal(pool.step(0, items, q, choose_blocks=10).out, dense)
    r = pool.step(0, items, q, choose_blocks=4, lse=True)
    group = s.num_q_heads // s.num_kv_heads
    for t in range(NEW):
        newest = (CACHED + t) // 16
        full = all_k[16 : newest * 16].reshape(newest - 1, 16, s.num_kv_heads, -1)
        most, least = full.max(1), full.min(1)
        for h in range(s.num_kv_heads):
            rows = slice(h * group, (h + 1) * group)
            x = q[t, rows, None]
            bounds = np.maximum(x * most[:, h], x * least[:, h]).sum(-1).max(0)
            blocks = {0, newest, *(1 + np.argsort(bounds)[-2:])}
            indices = np.array([[b * 16 + j for b in sorted(blocks) for j in range(16)]], np.int32)
            indices[indices > CACHED + t] = -1
            named = pool.step(
                0, [(seq, CACHED + t, 1)], q[t : t + 1], indices=indices, lse=True
            )
            np.testing.assert_allclose(r.out[t, rows], named.out[0, rows], atol=2e-5)
            np.testing.assert_allclose(r.lse[t, rows], named.lse[0, rows], atol=2e-5)
    with pytest.raises(ValueError, match="choose_blocks is -1"):
        pool.step(0, items, q, choose_blocks=-1)
    with pytest.raises(attnd.InvalidArgumentError, match="no parents and no indices"):
        pool.step(0, items, q, choose_blocks=2, indices=np.zeros((NEW, 1), np.int32))


def test_a_pool_over_two_cards_chooses_as_one_card_does_and_after_kills_too():
    """1,700 tokens that are there before anybody chooses: blocks' extremes go from card to card in four
    slices; a successor has only the blocks, and a fork shares them."""
    with Kept(**{"device.kv_memory": "96M", "device.index": "0,1"}) as d, attnd.connect(d.url) as c:
        n, n_more = 1700, 40
        wide = attnd.PoolSpec("one", 1, 8, 8, 128, 128, block_tokens=16, n_blocks=160)
        q, k, v, _ = tensors(wide, n + n_more)
        pools = [c.create_pool(wide._replace(name=f"choose-{x}", split=x)) for x in ("whole", "tokens")]
        seqs = [pool.open() for pool in pools]

        def step(a: int, b: int, **options):
            rows = [cut(x, a, b) for x in (q, k, v)]
            return [
                pool.step(0, [(seq, a, b - a)], *rows, lse=True, choose_blocks=6, **options)
                for pool, seq in zip(pools, seqs, strict=True)
            ]

        for at in range(0, n, 425):
            rows = {"k": cut(k, at, at + 425), "v": cut(v, at, at + 425)}
            for pool, seq in zip(pools, seqs, strict=True):
                pool.step(0, [(seq, at, 425)], **rows)
        at = n
        for more in (1, 1, 17, 1, 20):
            one, two = step(at, at + more)
            np.testing.assert_allclose(two.out, one.out, atol=2e-5)
            np.testing.assert_allclose(two.lse, one.lse, atol=2e-5)
            at += more
            if more == 17:
                seqs = [seq.fork() for seq in seqs]
            else:
                os.kill(worker_of(d.process.pid), signal.SIGKILL)
        dense = pools[1].step(0, [(seqs[1], at - 1, 1)], cut(q, at - 1, at))
        assert np.abs(dense.out[0] - two.out[-1]).max() > 1e-3


def test_chosen_blocks_over_asyncio(daemon):
    async def run() -> None:
        s = spec("later", "gqa", 16)
        q, k, v, _ = tensors(s, 100, 3)
        async with await attnd.aio.connect(daemon.url) as client:
            pool = await client.create_pool(s)
            seq = await pool.open()
            dense = await pool.step(0, [(seq, 0, 100)], q, k, v)
            last = [(seq, 99, 1)]
            some = await pool.step(0, last, q[99:], choose_blocks=3)
            every = await pool.step(0, last, q[99:], choose_blocks=7)
            np.testing.assert_allclose(every.out[0], dense.out[99], atol=2e-5)
            assert np.abs(some.out - every.out).max() > 1e-3

    asyncio.run(run())


def test_indices_that_do_not_fit_are_refused_by_name(client):
    s = spec("refused", "gqa", 16)
    pool = client.create_pool(s)
    seq, (q, k, v), _, _ = filled(pool, s)
    items = [(seq, CACHED, NEW)]
    good = np.zeros((NEW, 2), np.int32)
    with pytest.raises(TypeError, match="indices has dtype int64, expected int32"):
        pool.step(0, items, q, k, v, indices=good.astype(np.int64))
    with pytest.raises(ValueError, match=r"indices has shape \[2, 2\], expected \[3, 2\]"):
        pool.step(0, items, q, k, v, indices=good[:2])
    with pytest.raises(ValueError, match=r"indices has shape \[3\]"):
        pool.step(0, items, q, k, v, indices=good[:, 0].copy())
    with pytest.raises(ValueError, match="index_tokens is 16, without indices"):
        pool.step(0, items, q, k, v, index_tokens=16)
    with pytest.raises(attnd.InvalidArgumentError, match="no parents"):
        pool.step(0, items, q, k, v, indices=good, parents=[-1, 0, 1])
    ahead = good.copy()
    ahead[1, 1] = CACHED + 2
    why = r"indices\[1\]\[1\] is 152 .* sees \[0, 152\)"
    with pytest.raises(attnd.InvalidArgumentError, match=why):
        pool.step(0, items, q, k, v, indices=ahead)
    dilated = client.create_pool(spec("dilated", "gqa", 16, branches=[(64, 1), (128, 2)]))
    other = dilated.open()
    with pytest.raises(attnd.UnsupportedError, match="layer 0 is dilated"):
        dilated.step(0, [(other, 0, NEW)], q, k, v, indices=good)
    pool.step(0, items, q, k, v, indices=good)  # nothing was appended before


def test_sparse_steps_over_asyncio(daemon):
    async def run() -> None:
        async with await attnd.aio.connect(daemon.url) as client:
            s = spec("aio", "gqa", 16)
            pool = await client.create_pool(s)
            seq = await pool.open()
            q, k, v, _ = tensors(s, 8)
            indices = np.arange(8, dtype=np.int32)[:, None]
            r = await pool.step(0, [(seq, 0, 8)], q, k, v, indices=indices)
            np.testing.assert_allclose(r.out, np.repeat(v, 2, axis=1), atol=1e-6)

    asyncio.run(run())


TREE_HEADS, TREE_DIM, LAYERS = 2, 16, 2
PARENTS = [-1, 0, 0, 1, 2, -1]


def tree_spec(name: str) -> attnd.PoolSpec:
    return attnd.PoolSpec(
        name=name,
        num_layers=LAYERS,
        num_q_heads=TREE_HEADS,
        num_kv_heads=TREE_HEADS,
        head_dim_k=TREE_DIM,
        n_blocks=64,
    )


def tree_rows(codes: list[int], layer: int, what: int) -> np.ndarray:
    return np.stack(
        [
            np.random.default_rng([c, layer, what])
            .normal(size=(TREE_HEADS, TREE_DIM))
            .astype(np.float32)
            for c in codes
        ]
    )


def put_tree(pool, seq, layer, pos, codes, parents=None):
    q, k, v = (tree_rows(codes, layer, what) for what in range(3))
    return pool.step(layer, [(seq, pos, len(codes))], q, k, v, parents=parents)


def test_a_committed_path_is_as_if_it_had_come_alone(client):
    pool = client.create_pool(tree_spec("trees"))
    prompt, nodes = list(range(1, 20)), list(range(100, 106))
    tree, plain = pool.open(), pool.open()
    for layer in range(LAYERS):
        put_tree(pool, tree, layer, 0, prompt)
        put_tree(pool, plain, layer, 0, prompt)
        outs = put_tree(pool, tree, layer, 19, nodes, PARENTS).out
        alone = put_tree(pool, plain, layer, 19, [nodes[n] for n in (0, 2, 4)]).out
        np.testing.assert_allclose(outs[[0, 2, 4]], alone, atol=2e-5)
    with pytest.raises(attnd.InvalidArgumentError, match="no path"):
        tree.commit([0, 4])
    epoch = tree.epoch
    tree.commit([0, 2, 4])
    assert tree.epoch > epoch
    for layer in range(LAYERS):
        a, b = (put_tree(pool, s, layer, 22, [7]).out for s in (tree, plain))
        np.testing.assert_array_equal(a, b)

    calls = pool.calls()
    for layer in range(LAYERS):
        put_tree(pool, tree, layer, 23, nodes, PARENTS)
    calls.commit(tree, [5])
    calls.commit(plain, [0])
    committed, refused = calls.run()
    assert committed is tree and isinstance(refused, attnd.InvalidArgumentError)
    for layer in range(LAYERS):
        put_tree(pool, plain, layer, 23, [nodes[5]])
        a, b = (put_tree(pool, s, layer, 24, [8]).out for s in (tree, plain))
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="parents has 2 elements"):
        put_tree(pool, tree, 0, 25, [1, 2, 3], [-1, 0])


def test_trees_over_asyncio(daemon):
    async def run() -> None:
        async with await attnd.aio.connect(daemon.url) as client:
            pool = await client.create_pool(tree_spec("trees"))
            seq = await pool.open()
            for layer in range(LAYERS):
                x = tree_rows([1, 2, 3], layer, 0)
                await pool.step(layer, [(seq, 0, 3)], x, x, x, parents=[-1, 0, 0])
            await seq.commit([0, 2])
            x = tree_rows([4], 0, 0)
            await pool.step(0, [(seq, 2, 1)], x, x, x)

    asyncio.run(run())


# ---- parts of longer sequences

KV_HEADS = 2
SLOPES = [0.5, 0.1, 0.02, 0.004]
LOGITS = [0.3, -1.0, 2.0, 0.0]
PART_LAYERS = {
    "plain": {},
    "window": {"window_tokens": 50},
    "sinks": {"window_tokens": 30, "sink_tokens": 70},
    "alibi": {"alibi_slopes": SLOPES},
    "logits": {"sink_logits": LOGITS, "soft_cap": 4.0},
    "all": {
        "window_tokens": 90,
        "sink_tokens": 5,
        "alibi_slopes": SLOPES,
        "sink_logits": LOGITS,
    },
    "dilated": {"branches": [(16, 1), (64, 2)]},
}


def part_spec(name: str, **layer) -> attnd.PoolSpec:
    return attnd.PoolSpec(
        name=f"parts-{name}",
        num_layers=1,
        num_q_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim_k=DIM,
        head_dim_v=DIM,
        n_blocks=128,
        layers=[attnd.LayerSpec(**layer)],
    )


def part_tensors(n: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    return [reference.random(rng, n, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def merged(parts):
    """(out, lse) of results over other keys."""
    lse = np.array([r.lse for r in parts], np.float64)
    most = lse.max(0)
    weights = np.exp(lse - most)
    out = sum(w[..., None] * r.out for w, r in zip(weights, parts)) / weights.sum(0)[..., None]
    return out, most + np.log(weights.sum(0))


def starts_of(name: str) -> list[int]:
    """Of parts, and the end: anywhere, but for dilated layers, whose segments are whole."""
    return [0, 64, 192, 200] if name == "dilated" else [0, 67, 68, 131, 200]


@pytest.mark.parametrize("name", PART_LAYERS)
def test_parts_together_are_the_whole(client, name):
    pool = client.create_pool(part_spec(name, **PART_LAYERS[name]))
    layer = pool.spec.layers[0]
    q, k, v = part_tensors(200)
    starts = starts_of(name)
    seqs = []
    for base, end in zip(starts, starts[1:]):
        tail = pool.open()
        for pos in range(base, end, 40):  # a prompt in chunks
            n = min(40, end - pos)
            rows = slice(pos, pos + n)
            results = [
                pool.step(
                    0,
                    [(tail, pos - base, n)],
                    q[rows],
                    k[rows],
                    v[rows],
                    lse=True,
                    parts=[(base, 0)],
                )
            ]
            for (first, seq), past in zip(seqs, starts[1:]):
                n_keys = past - first
                for at in range(0, n, n_keys):  # no more queries than keys
                    m = min(n_keys, n - at)
                    results.append(
                        pool.step(
                            0,
                            [(seq, pos + at - first, m)],
                            q[pos + at : pos + at + m],
                            lse=True,
                            is_full=True,
                            parts=[(first, n_keys)],
                        )
                    )
                if n_keys < n:  # as one result
                    pieces = results[-(-(-n // n_keys)) :]
                    del results[-len(pieces) :]
                    results.append(
                        pieces[0]._replace(
                            out=np.concatenate([r.out for r in pieces]),
                            lse=np.concatenate([r.lse for r in pieces]),
                        )
                    )
            out, lse = merged(results)
            want, want_lse = reference.attention(
                q[rows], k[: pos + n], v[: pos + n], pos, layer
            )
            np.testing.assert_allclose(out, want, atol=2e-5)
            np.testing.assert_allclose(lse, want_lse, atol=2e-5)
        seqs.append((base, tail))


@pytest.mark.parametrize("name", PART_LAYERS)
def test_every_place_of_a_border_of_parts(client, name):
    """A query over a part and its tail, wherever the part ends."""
    pool = client.create_pool(part_spec(f"border-{name}", **PART_LAYERS[name]))
    layer = pool.spec.layers[0]
    q, k, v = part_tensors(130, 1)
    step = 64 if name == "dilated" else 7
    for border in range(step, 129, step):
        old, tail = pool.open(), pool.open()
        pool.step(0, [(old, 0, border)], k=k[:border], v=v[:border])
        pool.step(
            0, [(tail, 0, 129 - border)], k=k[border:129], v=v[border:129], parts=[(border, 0)]
        )
        items = [(tail, 129 - border, 1)]
        new = pool.step(0, items, q[129:], k[129:], v[129:], lse=True, parts=[(border, 0)])
        far = pool.step(
            0, [(old, 129, 1)], q[129:], lse=True, is_full=True, parts=[(0, border)]
        )
        out, lse = merged([new, far])
        want, want_lse = reference.attention(q[129:], k, v, 129, layer)
        np.testing.assert_allclose(out, want, atol=2e-5)
        np.testing.assert_allclose(lse, want_lse, atol=2e-5)
        old.close()
        tail.close()


def test_queries_may_be_further_on_than_a_daemon_has_tokens(client):
    pool = client.create_pool(part_spec("far", alibi_slopes=[1e-8] * HEADS))
    q, k, v = part_tensors(20, 2)
    seq = pool.open()
    pool.step(0, [(seq, 0, 20)], k=k, v=v)
    r = pool.step(
        0, [(seq, 1_000_000_000, 20)], q, lse=True, is_full=True, parts=[(1_000_000_000, 20)]
    )
    layer = attnd.LayerSpec(is_full=True)
    want, want_lse = reference.attention(q, k, v, 0, layer)
    np.testing.assert_allclose(r.out, want, atol=2e-5)
    np.testing.assert_allclose(r.lse, want_lse - 10, atol=2e-5)


def test_parts_that_do_not_fit_are_refused_by_name(client):
    pool = client.create_pool(part_spec("refused", window_tokens=8))
    dilated = client.create_pool(part_spec("refused-dilated", branches=[(16, 1), (64, 2)]))
    q, k, v = part_tensors(20, 3)
    seq = pool.open()
    pool.step(0, [(seq, 0, 20)], k=k, v=v)
    one = q[:1]
    full = {"is_full": True, "lse": True}
    for pos, parts, sentence in (
        (21, (0, 21), "n_keys is 21, layer 0 of the part has 20 tokens"),
        (19, (0, 20), r"step.n_keys\[0\] is 20, must be n_tokens 1 at least, and pos 19 at most"),
        (20, (0, 0), r"step.n_keys\[0\] is 0, must be n_tokens 1 at least"),
        (20, (2**31 - 21, 20), r"step.key_base\[0\] 2147483627 \+ pos 20 \+ n_tokens 1 pass"),
    ):
        with pytest.raises(attnd.InvalidArgumentError, match=sentence):
            pool.step(0, [(seq, pos, 1)], one, parts=[parts], **full)
    with pytest.raises(attnd.UnsupportedError, match="full 16, but layer 0 has a window"):
        pool.step(0, [(seq, 19, 1)], one, **full)
    with pytest.raises(attnd.InvalidArgumentError, match="choose 64 is not of parts 128"):
        pool.step(0, [(seq, 19, 1)], one, choose_blocks=1, parts=[(0, 0)])
    with pytest.raises(ValueError, match="parts has 2 entries, the step has 1 items"):
        pool.step(0, [(seq, 19, 1)], one, parts=[(0, 0), (0, 0)])
    other = dilated.open()
    with pytest.raises(attnd.UnsupportedError, match="has segments of 16 tokens"):
        dilated.step(0, [(other, 0, 20)], q, k, v, parts=[(20, 0)])
    assert pool.step(0, [(seq, 20, 1)], one, k[:1], v[:1], parts=[(0, 0)]).item_status == (0,)


def test_parts_over_asyncio(daemon):
    async def run() -> None:
        q, k, v = part_tensors(40, 4)
        async with await attnd.aio.connect(daemon.url) as client:
            pool = await client.create_pool(part_spec("later", window_tokens=25))
            old, tail = await pool.open(), await pool.open()
            await pool.step(0, [(old, 0, 30)], k=k[:30], v=v[:30])
            rows = slice(30, 40)
            new = await pool.step(
                0, [(tail, 0, 10)], q[rows], k[rows], v[rows], lse=True, parts=[(30, 0)]
            )
            far = await pool.step(
                0, [(old, 30, 10)], q[rows], lse=True, is_full=True, parts=[(0, 30)]
            )
            out, _ = merged([new, far])
            want, _ = reference.attention(q[rows], k, v, 30, attnd.LayerSpec(window_tokens=25))
            np.testing.assert_allclose(out, want, atol=2e-5)

    asyncio.run(run())
