"""Pools whose steps carry the heads of a model of latent attention, over several daemons: each daemon is
sent the weights, and what shards give is merged as heads. Every output against float64."""

import random

import attnd
import numpy as np
import pytest
from conftest import await_
from rig import HostsInAFile

from attnd_cluster.shards import LongSequence

SEED = random.randrange(1 << 30)
HEADS, LATENT, ROPE, NOPE, OUT, LAYERS = 3, 48, 16, 24, 32, 2
SPEC = attnd.PoolSpec(
    "heads",
    LAYERS,
    HEADS,
    1,
    LATENT + ROPE,
    LATENT,
    block_tokens=16,
    n_blocks=64,
    layers=[attnd.LayerSpec(scale=0.1)],
    model="weights 1",
    is_v_in_k=True,
    q_nope_dim=NOPE,
    out_dim=OUT,
)
_rng = np.random.default_rng(5)
WEIGHTS = [(_rng.standard_normal((HEADS, NOPE + OUT, LATENT)) / 4).astype("f4") for _ in range(LAYERS)]
Q = _rng.standard_normal((LAYERS, 400, HEADS, NOPE + ROPE)).astype("f4")
K = _rng.standard_normal((LAYERS, 400, 1, LATENT + ROPE)).astype("f4")  # of positions, whatever the ids


def give(pool):
    for layer in range(LAYERS):
        pool.weights(layer, WEIGHTS[layer])


def chain(layer, pos):
    """out and lse of the query at pos: projected, over all keys, and projected back."""
    w, q = WEIGHTS[layer].astype("f8"), Q[layer, pos].astype("f8")
    keys = K[layer, : pos + 1, 0].astype("f8")
    wide = np.concatenate((np.einsum("hn,hnc->hc", q[:, :NOPE], w[:, :NOPE]), q[:, NOPE:]), axis=1)
    s = wide @ keys.T * 0.1
    p = np.exp(s - s.max(axis=1, keepdims=True))
    latents = p @ keys[:, :LATENT] / p.sum(axis=1, keepdims=True)
    return np.einsum("hc,hvc->hv", latents, w[:, NOPE:]), np.log(p.sum(axis=1)) + s.max(axis=1)


def rebuild(seq):
    first, n = seq.n_cached, len(seq.tokens) - seq.n_cached
    for layer in range(LAYERS):
        seq.pool.step(layer, [(seq, first, n)], k=K[layer, first : first + n])


@pytest.fixture
def hosts(tmp_path):
    print("seed", SEED)
    made = HostsInAFile(tmp_path, rebuild)
    yield made
    made.close()


class Text:
    def __init__(self, pool, n, **options):
        self.pool, self.ids = pool, []
        self.seq = pool.open(**options)
        self.append(n)

    def append(self, n):
        pos, now = len(self.ids), slice(len(self.ids), len(self.ids) + n)
        ids = [(37 * p + SEED) % 997 for p in range(now.start, now.stop)]
        self.seq.set_tokens(pos, ids)
        self.ids += ids
        for layer in range(LAYERS):
            got = self.pool.step(layer, [(self.seq, pos, n)], Q[layer, now], K[layer, now], lse=True)
            assert got.out.shape == (n, HEADS, OUT)
            for i in range(n):
                out, lse = chain(layer, pos + i)
                np.testing.assert_allclose(got.out[i], out, rtol=1e-3, atol=1e-4)
                np.testing.assert_allclose(got.lse[i], lse, rtol=1e-4, atol=1e-4)

    def names(self):
        where = self.seq.where
        return {where} if isinstance(where, str) else {name for _, name in where}


def test_sequences_on_every_daemon_and_in_shards_have_heads(hosts):
    with hosts.make("a", "b", "c") as client:
        pool = client.create_pool(SPEC)
        give(pool)
        long = Text(pool, 50, shard_tokens=64)
        long.append(100)
        for _ in range(60):  # with one shard, and with more: by shard_decode.py then
            long.append(1)
        assert len(long.seq.shards) == 4 and long.names() == {"a", "b", "c"}
        others = [Text(pool, 20 + 5 * i) for i in range(6)]
        assert len(set().union(*(t.names() for t in others))) > 1
        items = [(t.seq, len(t.ids) - 1, 1) for t in (*others, long)]
        out = pool.step(1, items, Q[1, [pos for _, pos, _ in items]]).out
        for got, (_, pos, _) in zip(out, items):
            np.testing.assert_allclose(got, chain(1, pos)[0], rtol=1e-3, atol=1e-4)


def test_merged_heads_are_off_by_no_more_than_a_rounding_of_parts(hosts):
    """In bf16: what each shard gives is rounded, and so is their mean."""
    with hosts.make("a", "b", "c") as client:
        made = [client.create_pool(SPEC._replace(name=n, q_dtype="bf16"), array_dtype="f32") for n in ("x", "y")]
        outs = []
        for pool, options in zip(made, ({}, {"shard_tokens": 64})):
            for layer in range(LAYERS):
                bits = WEIGHTS[layer].view("u4") >> 16
                pool.weights(layer, bits.astype("u2"))
            with pool.open(**options) as seq:
                outs.append([pool.step(0, [(seq, 0, 180)], Q[0, :180], K[0, :180]).out])
                outs[-1] += [pool.step(0, [(seq, p, 1)], Q[0, p : p + 1], K[0, p : p + 1]).out for p in range(180, 186)]
                assert not isinstance(seq, LongSequence) or len(seq.shards) == 3
        whole, parts = (np.concatenate(x) for x in outs)
        assert np.linalg.norm(parts - whole) < 2**-7 * np.linalg.norm(whole)


def test_daemons_that_come_later_and_that_begin_empty_are_given_them(hosts):
    client = hosts.make("a")
    pool = client.create_pool(SPEC)
    with pytest.raises(attnd.NoWeightsError, match="layer 0 of pool heads has 0 of"):
        Text(pool, 5)
    give(pool)
    first = Text(pool, 40)
    hosts.make("a", "b").close()
    await_("b", lambda: len(client.members.now()) == 2)
    long = Text(pool, 150, shard_tokens=64)
    assert long.names() == {"a", "b"}
    hosts.kill("b")
    await_("its end", lambda: len(client.members.now()) == 1)
    long.append(1)  # made anew
    assert long.names() == {"a"}
    hosts.hosts["a"].signal_daemon(9)
    hosts.hosts["a"].start_daemon()
    first.append(1)
    long.append(2)


def test_weights_that_differ_are_refused_by_name(hosts, caplog):
    client = hosts.make("a", "b")
    with attnd.connect(hosts.hosts["b"].url) as other:
        other.create_pool(SPEC._replace(model="weights 2"))
        pool = client.create_pool(SPEC)
        give(pool)
        assert {name for _ in range(5) for name in Text(pool, 5).names()} == {"a"}
        assert "b takes no sequences of pool heads: " in caplog.text
        hosts.kill("a")
        await_("its end", lambda: len(client.members.now()) == 1)
        with pytest.raises(attnd.AlreadyExistsError, match=r"^b: .*model"):
            Text(pool, 5)


def test_what_is_not_a_layers_weights_is_refused_before_a_daemon_is_asked(hosts):
    with hosts.make("a") as client:
        pool, plain = client.create_pool(SPEC), client.create_pool(
            SPEC._replace(name="plain", q_nope_dim=0, out_dim=0)
        )
        with pytest.raises(ValueError, match="'plain' has no projections"):
            plain.weights(0, WEIGHTS[0])
        with pytest.raises(ValueError, match="weights"):
            pool.weights(0, WEIGHTS[0][:, 1:])
        with pytest.raises(attnd.InvalidArgumentError, match="layer is 2, the pool has 2 layers"):
            pool.weights(2, WEIGHTS[0])
        give(pool)
        with client.create_pool(SPEC) as again:  # whoever gives them
            Text(again, 5)
        Text(pool, 5)
