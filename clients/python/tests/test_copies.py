"""Steps whose tensors are copied where the daemon reads and writes them: what a model on a GPU does, here
with tensors in host memory."""

import pytest

torch = pytest.importorskip("torch")

import attnd  # noqa: E402
from attnd.serving import copies  # noqa: E402

HEADS, KV_HEADS, DIM = 8, 2, 64


@pytest.fixture(params=["f32", "bf16"])
def pool(client, request):
    spec = attnd.PoolSpec(
        f"copies-{request.param}",
        num_layers=2,
        num_q_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim_k=DIM,
        n_blocks=64,
        q_dtype=request.param,
    )
    with client.create_pool(spec) as pool:
        yield pool


def random_qkv(n, dtype):
    shapes = [(n, HEADS, DIM), (n, KV_HEADS, DIM), (n, KV_HEADS, DIM)]
    return [torch.randn(*shape, dtype=dtype) for shape in shapes]


def as_numpy(x, pool):
    x = x.to(copies.DTYPE_OF[pool.spec.q_dtype]).contiguous()
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def expected(pool, seq, layer, pos, qkv):
    out = pool.step(layer, [(seq, pos, len(qkv[0]))], *(as_numpy(x, pool) for x in qkv)).out
    out = torch.from_numpy(out)
    return out.view(torch.bfloat16) if pool.spec.q_dtype == "bf16" else out


def parts_of(seq, qkv, out, sizes):
    """The sequence's rows, from position 0 on, in steps of these sizes."""
    at = 0
    for n in sizes:
        rows = slice(at, at + n)
        yield attnd.pool.Items([(seq, at, n)]), [x[rows] for x in qkv], out[rows]
        at += n


@pytest.mark.parametrize("sizes", [[1], [37], [16, 16, 1], [5, 40, 3, 20, 60]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_in_flight_are_those_one_after_another(pool, sizes, dtype):
    a, b = pool.open(), pool.open()
    n = sum(sizes)
    for layer in range(2):
        qkv = random_qkv(n, dtype)
        strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in qkv]
        out = torch.full((n, HEADS, DIM), torch.nan, dtype=dtype)
        results = list(copies.run_in_place(pool, layer, parts_of(a, strided, out, sizes)))
        assert len(results) == len(sizes)
        assert all(r.item_status == (0,) and ns > 0 for r, ns in results)
        at = 0
        for size in sizes:
            rows = [x[at : at + size] for x in qkv]
            assert torch.equal(out[at : at + size], expected(pool, b, layer, at, rows).to(dtype))
            at += size
    # q alone, over what is cached
    q, out = torch.randn(1, HEADS, DIM, dtype=dtype), torch.full((1, HEADS, DIM), torch.nan)
    items = attnd.pool.Items([(a, n - 1, 1)])
    list(copies.run_in_place(pool, 0, [(items, [q], out)]))
    want = pool.step(0, [(b, n - 1, 1)], as_numpy(q, pool)).out
    want = torch.from_numpy(want)
    want = want.view(torch.bfloat16) if pool.spec.q_dtype == "bf16" else want
    assert torch.equal(out, want.float())
    a.close()
    b.close()


def test_a_step_that_fails_ends_the_layer(pool):
    seq, qkv = pool.open(), random_qkv(40, torch.float32)
    out = torch.full((40, HEADS, DIM), torch.nan)
    items = [attnd.pool.Items([(seq, pos, 10)]) for pos in (0, 20, 30)]  # a gap behind the first
    parts = [
        (it, [x[i : i + 10] for x in qkv], out[i : i + 10]) for it, i in zip(items, (0, 10, 20))
    ]
    done = []
    with pytest.raises(attnd.InvalidArgumentError, match="pos"):
        for result in copies.run_in_place(pool, 0, parts):
            done.append(result)
    assert len(done) == 1 and not out[:10].isnan().any() and out[10:].isnan().all()
    assert not pool._steps  # nothing is in flight
    seq.close()


@pytest.mark.parametrize("when", ["fill", "take"])
def test_what_a_copy_raises_is_raised_by_the_step(pool, when, monkeypatch):
    def broken(self, *addresses):
        raise RuntimeError(f"no copy in {when}")

    seq, qkv = pool.open(), random_qkv(3, torch.float32)
    out = torch.full((3, HEADS, DIM), torch.nan)
    monkeypatch.setattr(copies.Copies, when, broken)
    parts = [(attnd.pool.Items([(seq, 0, 3)]), qkv, out)]
    with pytest.raises(RuntimeError, match=f"no copy in {when}"):
        list(copies.run_in_place(pool, 0, parts))
    monkeypatch.undo()
    list(copies.run_in_place(pool, 0, parts))  # the same tokens again
    twin = pool.open()
    assert torch.equal(out, expected(pool, twin, 0, 0, qkv).float())
    seq.close()
    twin.close()


def test_an_interrupted_copy_is_made_whole(pool, monkeypatch):
    seq, twin, qkv = pool.open(), pool.open(), random_qkv(3, torch.float32)
    out = torch.full((3, HEADS, DIM), torch.nan)
    n_calls, fill = 0, copies.Copies.fill

    def interrupted(self, *addresses):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 1:
            raise KeyboardInterrupt
        fill(self, *addresses)

    monkeypatch.setattr(copies.Copies, "fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(copies.run_in_place(pool, 0, [(attnd.pool.Items([(seq, 0, 3)]), qkv, out)]))
    assert n_calls == 2
    want = expected(pool, twin, 0, 0, qkv)
    q = qkv[0][2:]
    assert torch.equal(  # the keys and values are those
        torch.from_numpy(pool.step(0, [(seq, 2, 1)], as_numpy(q, pool)).out.copy()).view(want.dtype),
        want[2:],
    )
    seq.close()
    twin.close()


def test_a_missing_gpu_is_named_where_memory_is_to_be_pinned(client):
    if torch.cuda.is_available():
        client.pin_memory()
        return
    with pytest.raises(attnd.UnsupportedError) as e:
        client.pin_memory()
    assert str(e.value)
