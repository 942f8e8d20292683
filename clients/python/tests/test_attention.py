"""What queries see: latents (V in K, as MLA has it), sequences whose beginning is in another pool, and
what layers of today's models ask for, as docs/protocol/step-kinds.md expresses it; and how far outputs are
from float64 by what a cache stores (pytest -s -k errors prints the figures of docs/kernels.md).
"""

import sys

import numpy as np
import pytest
from conftest import PACKAGE, Daemon
from reference import attention, from_bf16, random, to_bf16

import attnd

if str(PACKAGE / "examples") not in sys.path:
    sys.path.insert(0, str(PACKAGE / "examples"))

import llama  # noqa: E402

HEADS, LATENT, ROPE = 5, 512, 64
DIM = LATENT + ROPE
LAYER = attnd.LayerSpec(scale=0.05)


def make_pool(client, name, **options):
    options = {"n_blocks": 32, "is_batch_invariant": True, "layers": (LAYER,), **options}
    return client.create_pool(
        attnd.PoolSpec(name, 1, HEADS, 1, DIM, LATENT, is_v_in_k=True, **options)
    )


def tensors(seed, n):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, heads, DIM)).astype("f4") for heads in (HEADS, 1)]


def check(out, q, k, pos):
    want, _ = attention(q, k, k[..., :LATENT], pos, LAYER)
    assert out.shape == (len(q), HEADS, LATENT)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=2e-5)


def test_a_token_is_sent_and_stored_once(client):
    pool = make_pool(client, "latent")
    assert pool.spec.is_v_in_k and pool.spec.head_dim_v == LATENT
    q, k = tensors(1, 40)
    with pool.open() as s:
        check(pool.step(0, [(s, 0, 30)], q[:30], k[:30]).out, q[:30], k[:30], 0)
        for pos in range(30, 40):
            now = slice(pos, pos + 1)
            check(pool.step(0, [(s, pos, 1)], q[now], k[now]).out, q[now], k[: pos + 1], pos)
        again = pool.step(0, [(s, 35, 5)], q[35:]).out
        check(again, q[35:], k, 35)
        with pytest.raises(ValueError, match="v is given, the pool has it in k"):
            pool.step(0, [(s, 40, 1)], q[:1], k[:1], k[:1, :, :LATENT])
        with s.fork() as f:
            assert np.array_equal(pool.step(0, [(f, 35, 5)], q[35:]).out, again)


def test_what_cannot_be_is_named(client):
    for change, says in (
        ({"head_dim_k": 584}, "head_dim_k is 584, must be 8 to 576"),
        ({"head_dim_v": 520}, "head_dim_v is 520, must be 8 to 512"),
        ({"head_dim_k": 256}, "head_dim_v is 512, more than head_dim_k 256 with V in K"),
        ({"is_v_in_k": False}, "head_dim_k is 576, must be 8 to 512"),
    ):
        spec = attnd.PoolSpec("no", 1, HEADS, 1, DIM, LATENT, n_blocks=1, is_v_in_k=True)
        with pytest.raises(attnd.InvalidArgumentError, match=says):
            client.create_pool(spec._replace(**change))


def test_prefixes_files_and_lanes_have_latents(client, tmp_path):
    pool = make_pool(client, "latent shared", kv_dtype="int8")
    plain = make_pool(client, "latent plain")
    q, k = tensors(2, 40)
    ids = list(range(100, 140))
    with pool.open(tokens=ids) as a:
        want = pool.step(0, [(a, 0, 40)], q, k).out
        with pool.open(tokens=ids) as b:
            assert b.n_cached == 32
            out = pool.step(0, [(b, 32, 8)], q[32:], k[32:]).out
            assert np.array_equal(out, want[32:])
        a.export(tmp_path / "a")
        with pytest.raises(attnd.InvalidArgumentError, match="kv_dtype"):
            plain.import_sequence(tmp_path / "a")
    with pool.import_sequence(tmp_path / "a") as c:
        assert np.array_equal(pool.step(0, [(c, 32, 8)], q[32:]).out, want[32:])
    with client.open_lane() as lane, plain.open() as a, plain.open() as b:
        lane.plan(plain, [(a, 0, 40)])
        out = np.full((40, HEADS, LATENT), np.nan, "f4")
        lane.enqueue(plain, 40, q.ctypes.data, k.ctypes.data, out=out.ctypes.data)
        lane.check()
        assert np.array_equal(out, plain.step(0, [(b, 0, 40)], q, k).out)
        check(out, q, k, 0)


# ---- full steps

OLD, NEW = 70, 23
PARTS = attnd.PoolSpec("old", 1, 8, 2, 32, n_blocks=32)


def merged(parts):
    """Of (out, lse) over disjoint keys."""
    lses = np.stack([lse for _, lse in parts]).astype(np.float64)
    weights = np.exp(lses - lses.max(0))
    outs = np.stack([out for out, _ in parts]).astype(np.float64)
    return (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None]


@pytest.fixture(scope="module")
def two_cards():
    with Daemon(**{"device.index": "0,1", "device.kv_memory": "16M"}) as d, attnd.connect(d.url) as c:
        yield c


@pytest.mark.parametrize("split", ["whole", "heads", "tokens"])
def test_a_prompt_sees_all_of_what_is_elsewhere(two_cards, split):
    rng = np.random.default_rng(7)
    q, k, v = random(rng, OLD + NEW, 8, 32), *(random(rng, OLD + NEW, 2, 32) for _ in range(2))
    old = two_cards.create_pool(PARTS._replace(name=f"old-{split}", split=split))
    new = two_cards.create_pool(PARTS._replace(name=f"new-{split}", split=split))
    expected, _ = attention(q[OLD:], k, v, OLD)
    with old.open() as a, new.open() as b:
        old.step(0, [(a, 0, OLD)], None, k[:OLD], v[:OLD])
        rest = new.step(0, [(b, 0, NEW)], q[OLD:], k[OLD:], v[OLD:], lse=True)
        far = old.step(0, [(a, OLD - NEW, NEW)], q[OLD:], lse=True, is_full=True)
        np.testing.assert_allclose(
            merged([(far.out, far.lse), (rest.out, rest.lse)]), expected, rtol=2e-5, atol=2e-6
        )
        # a causal step, which hides what lies behind each query's place there, does not
        causal = old.step(0, [(a, OLD - NEW, NEW)], q[OLD:], lse=True)
        wrong = merged([(causal.out, causal.lse), (rest.out, rest.lse)])
        assert np.abs(wrong - expected).max() > 1e-3


def test_more_queries_than_a_message_holds_all_see_it(two_cards):
    rng = np.random.default_rng(8)
    n, spec = 600, PARTS._replace(name="large", n_blocks=64)
    q, k, v = random(rng, n, 8, 32), *(random(rng, n, 2, 32) for _ in range(2))
    pool = two_cards.create_pool(spec)
    with pool.open() as s:
        pool.step(0, [(s, 0, n)], None, k, v)
        got = pool.step(0, [(s, 0, n)], q, lse=True, is_full=True)
    expected, lse = attention(q, k, v, 0, attnd.LayerSpec(is_full=True))
    np.testing.assert_allclose(got.out, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(got.lse, lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "layer, word",
    [
        (attnd.LayerSpec(window_tokens=20), "window_tokens"),
        (attnd.LayerSpec(alibi_slopes=(0.5,) * 8), "alibi_slopes"),
        (attnd.LayerSpec(sink_logits=(0.5,) * 8), "sink_logits"),
        (attnd.LayerSpec(branches=((8, 1), (16, 2))), "branch_rates"),
    ],
)
def test_what_depends_on_positions_is_refused(two_cards, layer, word):
    rng = np.random.default_rng(9)
    q, k, v = random(rng, 4, 8, 32), *(random(rng, 4, 2, 32) for _ in range(2))
    pool = two_cards.create_pool(PARTS._replace(name=word, n_blocks=4, layers=(layer,)))
    with pool.open() as s:
        pool.step(0, [(s, 0, 4)], None, k, v)
        with pytest.raises(attnd.UnsupportedError, match=word):
            pool.step(0, [(s, 0, 4)], q, is_full=True)
        with pytest.raises(attnd.InvalidArgumentError, match="is_full"):
            pool.step(0, [(s, 4, 4)], q, k, v, is_full=True)
        assert np.isfinite(pool.step(0, [(s, 0, 4)], q).out).all()


# ---- layers of models


def model_pool(client, name, num_layers=1, **layer):
    layers = (attnd.LayerSpec(**layer),) * num_layers if layer else ()
    spec = attnd.PoolSpec(name, num_layers, 8, 2, 32, n_blocks=32, layers=layers)
    return client.create_pool(spec)


def model_tensors(seed, n):
    rng = np.random.default_rng(seed)
    return [random(rng, n, heads, 32) for heads in (8, 2, 2)]


def close(got, want):
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_chunks_of_a_sequence_see_nothing_of_those_before(client):
    """Llama 4: a branch of all tokens whose segments are the chunks."""
    chunk, n = 24, 100
    pool = model_pool(client, "chunked", branches=((chunk, 1),))
    q, k, v = model_tensors(1, n)
    with pool.open() as s:
        got = [pool.step(0, [(s, 0, 70)], q[:70], k[:70], v[:70]).out]
        for t in range(70, n):
            got.append(pool.step(0, [(s, t, 1)], q[t : t + 1], k[t : t + 1], v[t : t + 1]).out)
    want = np.empty((n, 8, 32))
    for first in range(0, n, chunk):
        own = slice(first, min(first + chunk, n))
        want[own] = attention(q[own], k[own], v[own], 0)[0]
    close(np.concatenate(got), want)


def test_a_query_has_its_own_temperature_and_a_head_its_own_scale(client):
    """Llama 4's temperature by position: the worker multiplies q, a soft cap comes after it."""
    n = 40
    pool = model_pool(client, "temperature", soft_cap=4.0)
    q, k, v = model_tensors(2, n)
    factors = (1 + 0.2 * np.arange(n)[:, None] + 0.1 * np.arange(8))[..., None]
    with pool.open() as s:
        got = pool.step(0, [(s, 0, n)], (q * factors).astype(np.float32), k, v).out
    want = np.empty((n, 8, 32))
    for t in range(n):
        for h in range(8):
            g = h // 4
            layer = attnd.LayerSpec(scale=32**-0.5 * factors[t, h, 0], soft_cap=4.0)
            one = attention(q[t : t + 1, h : h + 1], k[:, g : g + 1], v[:, g : g + 1], t, layer)[0]
            want[t, h] = one[0, 0]
    close(got, want)


def test_layers_share_the_keys_of_one(client):
    """Gemma 3n, YOCO: the pool has the layers that store; the others attend over one of these."""
    n = 50
    pool = model_pool(client, "sharing", num_layers=2)
    stores = [model_tensors(3 + i, n) for i in range(2)]
    other = model_tensors(5, n)[0]
    with pool.open() as s:
        for begin, end in ((0, 30), (30, 49), (49, 50)):
            now = slice(begin, end)
            items = [(s, begin, end - begin)]
            for i, (q, k, v) in enumerate(stores):
                close(
                    pool.step(i, items, q[now], k[now], v[now]).out,
                    attention(q[now], k[:end], v[:end], begin)[0],
                )
            _, k, v = stores[1]
            close(
                pool.step(1, items, other[now]).out,
                attention(other[now], k[:end], v[:end], begin)[0],
            )


@pytest.mark.parametrize("n_new", [1, 7])
def test_cross_attention_sees_all_of_what_was_written_once(client, n_new):
    """The encoder's keys are a sequence; the decoder's tokens attend over its end, with `full`."""
    n_source = 45
    pool = model_pool(client, f"cross-{n_new}")
    _, k, v = model_tensors(6, n_source)
    q = model_tensors(7, n_new)[0]
    with pool.open() as source:
        pool.step(0, [(source, 0, n_source)], None, k, v)
        items = [(source, n_source - n_new, n_new)]
        got = pool.step(0, items, q, is_full=True).out
        close(got, attention(q, k, v, 0, attnd.LayerSpec(is_full=True))[0])
        with source.fork() as beam:
            again = pool.step(0, [(beam, n_source - n_new, n_new)], q, is_full=True).out
            assert np.array_equal(again, got)


# ---- what caches store


N, N_QUERIES = 1024, 32
# of the outputs' L2 norm
BOUNDS = {"bf16": 0.005, "fp8_e4m3": 0.06, "int8": 0.03, "nvfp4": 0.2, "mxfp4": 0.25}


def rounded(x):
    return from_bf16(to_bf16(x))


def normal():
    """Normal numbers, 8 query heads over 2: little is alike, so that errors count in full."""
    rng = np.random.default_rng(3)
    return [[rounded(random(rng, N, heads, 128)) for heads in (8, 2, 2)]]


class Recorder:
    """Plain attention that keeps what it is asked."""

    def __init__(self):
        self.seen = []

    def begin(self, items):
        pass

    def attend(self, layer, q, k, v):
        self.seen.append([rounded(x) for x in (q, k, v)])
        s = np.einsum("ihd,jhd->hij", q, k.repeat(q.shape[1] // k.shape[1], 1)) / q.shape[2] ** 0.5
        s = np.where(np.tri(len(q), dtype=bool), s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        return np.einsum("hij,jhd->ihd", p, v.repeat(q.shape[1] // v.shape[1], 1)).astype("f4")


def bytelm():
    """A small language model's, in each of its layers, over text of its kind."""
    recorder = Recorder()
    text = (PACKAGE / "examples" / "llama.py").read_bytes()[:N]
    llama.Llama().forward(np.frombuffer(text, np.uint8), [llama.Item(0, 0, N)], recorder)
    return recorder.seen


@pytest.mark.parametrize("tensors", [normal, bytelm])
def test_errors_against_float64_are_those_of_the_dtype(client, tensors):
    layers = tensors()
    q, k, _ = layers[0]
    spec = attnd.PoolSpec("", len(layers), q.shape[1], k.shape[1], k.shape[2], n_blocks=N // 16)
    tail = slice(N - N_QUERIES, N)
    want = [attention(q[tail], k, v, N - N_QUERIES) for q, k, v in layers]
    for kv_dtype, bound in BOUNDS.items():
        name = f"errors of {kv_dtype}, {tensors.__name__}"
        pool = client.create_pool(spec._replace(name=name, q_dtype="bf16", kv_dtype=kv_dtype))
        norm = off = scores = 0.0
        with pool.open() as s:
            for layer, (q, k, v) in enumerate(layers):
                pool.step(layer, [(s, 0, N)], None, to_bf16(k), to_bf16(v))
                item = [(s, N - N_QUERIES, N_QUERIES)]
                got = pool.step(layer, item, to_bf16(q[tail]), lse=True)
                out, lse = want[layer]
                off += np.square(from_bf16(got.out) - out).sum()
                norm += np.square(out).sum()
                scores = max(scores, np.abs(got.lse - lse).max())
        error = (off / norm) ** 0.5
        print(f"{name}: out {error:.4f} of its norm, lse at most {scores:.4f} off")
        assert error < bound, name
        pool.close()


@pytest.mark.parametrize("kv_dtype, dim", [("nvfp4", 72), ("mxfp4", 80)])
def test_groups_that_are_not_whole_are_refused_by_name(client, kv_dtype, dim):
    group = {"nvfp4": 16, "mxfp4": 32}[kv_dtype]
    spec = attnd.PoolSpec("no", 1, 8, 2, dim, n_blocks=1, kv_dtype=kv_dtype)
    says = f"head_dim_k is {dim}, not a multiple of {group} with kv_dtype {kv_dtype}"
    with pytest.raises(attnd.InvalidArgumentError, match=says):
        client.create_pool(spec)
