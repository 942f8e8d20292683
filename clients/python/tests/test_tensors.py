"""Arrays in and out: what is taken in place, and what is refused by name."""

import ctypes

import numpy as np
import pytest
from reference import attention, from_bf16, random, to_bf16

import attnd
from attnd import _tensor

import conftest


class Foreign:
    """A DLPack tensor of another library: numpy's capsule, without being a numpy array."""

    def __init__(self, array, device=(1, 0)):
        self.array = array
        self.device = device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


class _Managed(ctypes.Structure):
    _fields_ = [
        ("tensor", _tensor._DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class ForeignBf16:
    """bf16 as a library that has it gives it: type code 4, with a byte offset."""

    def __init__(self, bits):
        self.bits = bits
        self.shape = (ctypes.c_int64 * bits.ndim)(*bits.shape)
        t = _tensor._DLTensor(
            data=bits.ctypes.data - 64,
            byte_offset=64,
            device_type=1,
            ndim=bits.ndim,
            code=4,
            bits=16,
            lanes=1,
            shape=self.shape,
        )
        self.managed = _Managed(t, None, None)

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, stream=None):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), b"dltensor", None)


@pytest.fixture
def pool(client, request):
    dtype = getattr(request, "param", "f32")
    spec = attnd.PoolSpec(f"tensors-{dtype}", 1, 4, 2, 32, n_blocks=16, q_dtype=dtype)
    return client.create_pool(spec)


def qkv(seed, n=3):
    rng = np.random.default_rng(seed)
    return random(rng, n, 4, 32), random(rng, n, 2, 32), random(rng, n, 2, 32)


def test_outputs_are_written_in_place(pool):
    q, k, v = qkv(1)
    out, lse = np.full((3, 4, 32), np.nan, np.float32), np.full((3, 4), np.nan, np.float32)
    with pool.open() as seq:
        r = pool.step(0, [(seq, 0, 3)], q, k, v, out=out, lse=lse)
    assert r.out is out and r.lse is lse
    want, want_lse = attention(q, k, v, 0)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_any_dlpack_tensor_is_taken_in_and_out(pool):
    q, k, v = qkv(2)
    out = np.full((3, 4, 32), np.nan, np.float32)
    with pool.open() as seq:
        r = pool.step(0, [(seq, 0, 3)], Foreign(q), Foreign(k), Foreign(v), out=Foreign(out))
    assert r.out.array is out
    np.testing.assert_allclose(out, attention(q, k, v, 0)[0], atol=1e-5)


def test_pinned_host_memory_is_host_memory(pool):
    q, k, v = qkv(3)
    with pool.open() as seq:
        out = pool.step(0, [(seq, 0, 3)], Foreign(q, (3, 0)), Foreign(k, (11, 0)), v).out
    np.testing.assert_allclose(out, attention(q, k, v, 0)[0], atol=1e-5)


@pytest.mark.parametrize("pool", ["bf16"], indirect=True)
def test_bf16_is_taken_as_uint16_and_as_dlpack_bfloat(pool):
    q, k, v = (to_bf16(x) for x in qkv(4))
    want = attention(from_bf16(q), from_bf16(k), from_bf16(v), 0)[0]
    with pool.open() as seq:
        plain = pool.step(0, [(seq, 0, 3)], q, k, v).out
        foreign = np.full((3, 4, 32), 0x7FC0, np.uint16)
        pool.step(0, [(seq, 0, 3)], *map(ForeignBf16, (q, k, v)), out=ForeignBf16(foreign))
    assert plain.dtype == np.uint16
    np.testing.assert_allclose(from_bf16(plain), want, atol=2e-2)
    np.testing.assert_array_equal(plain, foreign)


def as_f32(client):
    spec = attnd.PoolSpec("tensors-bf16", 1, 4, 2, 32, n_blocks=16, q_dtype="bf16")
    return client.create_pool(spec, array_dtype="f32")


def bf16_bound(q, k, v):
    """Of what rounding q, k, v and out to bf16 does to out (docs/networked.md)."""
    d = 2.0**-8
    scores = np.einsum("thd,jhd->thj", np.abs(q), np.abs(k).repeat(2, 1)) * q.shape[2] ** -0.5
    e = (2 * d + d * d) * scores.max(2, keepdims=True)
    return (np.exp(2 * e) * (1 + d) ** 2 - 1) * attention(q, k, np.abs(v), 0)[0]


def test_arrays_of_f32_over_bf16_are_within_the_stated_bound(client):
    pool = as_f32(client)
    q, k, v = qkv(11, 40)
    with pool.open() as seq:
        r = pool.step(0, [(seq, 0, 40)], q, k, v, lse=True)
    want, lse = attention(q, k, v, 0)
    assert r.out.dtype == np.float32
    assert (np.abs(r.out - want) <= bf16_bound(q, k, v)).all()
    assert np.abs(r.out - want).max() > 1e-4  # it was bf16 that travelled
    np.testing.assert_allclose(r.lse, lse, atol=0.1)


@pytest.mark.parametrize("pool", ["bf16"], indirect=True)
def test_arrays_of_f32_over_bf16_are_those_of_bf16_to_the_bit(client, pool):
    q, k, v = qkv(12)
    q[0, 0, :4] = np.inf, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1e-40  # ties to even, subnormal
    k[0, 0, :4] = 0
    v[1, 1, :2] = -np.inf, np.nan
    wide = as_f32(client)
    with pool.open() as seq, wide.open() as other:
        a = pool.step(0, [(seq, 0, 3)], *map(to_bf16_or_nan, (q, k, v))).out
        b = wide.step(0, [(other, 0, 3)], q, k, v).out
        # and more of one sequence through the other
        a2 = pool.step(0, [(seq, 3, 3)], *map(to_bf16, qkv(13))).out
        b2 = wide.step(0, [(other, 3, 3)], *qkv(13)).out
    np.testing.assert_array_equal(from_bf16(a), b)
    np.testing.assert_array_equal(from_bf16(a2), b2)


def to_bf16_or_nan(x):
    return np.where(np.isnan(x), np.uint16(0x7FC0), to_bf16(x))


def test_arrays_of_another_dtype_than_the_pool_takes_are_refused(client):
    spec = attnd.PoolSpec("tensors-f16", 1, 4, 2, 32, n_blocks=16, q_dtype="f16")
    for array_dtype, q_dtype in (("f32", "f16"), ("bf16", "f32"), ("f64", "bf16")):
        with pytest.raises(ValueError, match=f"array_dtype is '{array_dtype}'"):
            client.create_pool(spec._replace(q_dtype=q_dtype), array_dtype=array_dtype)
    pool = as_f32(client)
    refused(pool, TypeError, "q has dtype uint16, the pool's arrays are f32", q=to_bf16(qkv(1)[0]))
    pool._dtype = _tensor.F16
    arrays = dict(zip("qkv", (x.astype(np.float16) for x in qkv(2))))
    refused(pool, attnd.InvalidArgumentError, "array_dtype f16 and a pool of bf16", **arrays)


@pytest.mark.parametrize("pool", ["f16"], indirect=True)
def test_f16_is_taken(pool):
    q, k, v = (x.astype(np.float16) for x in qkv(5))
    with pool.open() as seq:
        out = pool.step(0, [(seq, 0, 3)], q, k, v).out
    assert out.dtype == np.float16
    np.testing.assert_allclose(out, attention(q, k, v, 0)[0], atol=4e-3)


def refused(pool, error, match, **arrays):
    q, k, v = qkv(6)
    arrays = {"q": q, "k": k, "v": v, **arrays}
    with pool.open() as seq, pytest.raises(error, match=match):
        pool.step(0, [(seq, 0, 3)], **arrays)


def test_a_tensor_on_a_gpu_is_refused_by_name(pool):
    q, k, v = qkv(7)
    refused(pool, TypeError, "k is on cuda:1.*copy it explicitly", k=Foreign(k, (2, 1)))


def test_wrong_arrays_are_refused_by_name(pool):
    q, k, v = qkv(8)
    refused(pool, TypeError, "q has dtype float64, the pool's arrays are f32", q=q.astype(float))
    refused(pool, TypeError, "q has dtype >f4", q=q.astype(">f4"))
    refused(pool, TypeError, "v has dtype float16", v=Foreign(v.astype(np.float16)))
    refused(pool, ValueError, r"k has shape \[2, 2, 32\], expected \[3, 2, 32\]", k=k[:2])
    refused(pool, ValueError, r"q has shape \[3, 4, 16\]", q=Foreign(q[..., :16]))
    refused(pool, ValueError, "q is not C-contiguous", q=np.asfortranarray(q))
    refused(pool, ValueError, "k is not contiguous", k=Foreign(np.asfortranarray(k)))
    refused(pool, TypeError, "v is a list", v=v.tolist())
    read_only = np.zeros_like(q)
    read_only.flags.writeable = False
    refused(pool, ValueError, "out is read-only", out=read_only)
    refused(pool, TypeError, "lse has dtype float64", lse=np.zeros((3, 4)))


def test_half_of_k_and_v_is_refused(pool):
    refused(pool, attnd.InvalidArgumentError, "k and v must be given both or neither", v=None)


def test_read_only_inputs_are_fine(pool):
    q, k, v = qkv(9)
    for x in (q, k, v):
        x.flags.writeable = False
    with pool.open() as seq:
        out = pool.step(0, [(seq, 0, 3)], q, k, v).out
    np.testing.assert_allclose(out, attention(q, k, v, 0)[0], atol=1e-5)


def test_torch_tensors_are_taken_and_given():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    t = torch.randn(2, 3, dtype=torch.bfloat16)
    address, _ = _tensor.address_of(t, "t", _tensor.BF16, (2, 3), True)
    assert address == t.data_ptr()
    new = _tensor.empty(t, (4, 5), _tensor.BF16)
    assert new.dtype is torch.bfloat16 and new.shape == (4, 5)
    with pytest.raises(ValueError, match="not contiguous"):
        _tensor.address_of(t.T, "t", _tensor.BF16, (3, 2))


# ---- codes on the wire


CODES = np.array([sign * (m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10))
                  for sign in (1, -1) for e in range(16) for m in range(8)])
CODES[[127, 255]] = np.nan


def through_codes(*tensors):
    """What comes out of q, k and v that travel as codes of fp8 (docs/protocol/steps.md)."""
    def padded(x):
        return np.concatenate([x.ravel(), np.zeros(-x.size % 32)])

    payload = np.concatenate([padded(from_bf16(to_bf16(x)).astype(np.float64)) for x in tensors])
    payload = payload[: payload.size - (-tensors[-1].size % 32)]
    for at in range(0, payload.size, 128):
        group = payload[at : at + 128]
        most = np.float32(np.abs(group).max())
        if most > 0:
            scale = most / np.float32(448)
            x = (group.astype(np.float32) / scale).astype(np.float64)
            distance = np.abs(x[:, None] - CODES) + np.arange(256) % 2 * 1e-9  # ties to even
            group[:] = CODES[np.nanargmin(distance, axis=1)].astype(np.float32) * scale
    payload = from_bf16(to_bf16(payload.astype(np.float32)))
    at, out = 0, []
    for x in tensors:
        out.append(payload[at : at + x.size].reshape(x.shape))
        at += x.size + -x.size % 32
    return out


def coded(client, **geometry):
    if conftest.TRANSPORT == "shm":
        pytest.skip("shared memory has no wire")
    spec = attnd.PoolSpec("codes", 1, 4, 2, 32, n_blocks=16, q_dtype="bf16")._replace(**geometry)
    return client.create_pool(spec), client.create_pool(spec, wire_dtype="fp8_e4m3")


@pytest.mark.parametrize("head_dim, n_tokens", [(32, 3), (128, 5), (8, 1), (24, 7), (256, 40)])
def test_codes_give_what_arrays_that_went_through_them_give(client, head_dim, n_tokens):
    plain, codes = coded(client, name=f"codes-{head_dim}", head_dim_k=head_dim)
    random = np.random.default_rng(head_dim)
    shapes = ((n_tokens, h, head_dim) for h in (4, 2, 2))
    q, k, v = (random.standard_normal(shape, np.float32) for shape in shapes)
    rounded = [to_bf16(x) for x in through_codes(q, k, v)]
    with plain.open() as a, codes.open() as b:
        want = plain.step(0, [(a, 0, n_tokens)], *rounded, lse=True)
        got = codes.step(0, [(b, 0, n_tokens)], *map(to_bf16, (q, k, v)), lse=True)
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)
    exact = attention(*(from_bf16(to_bf16(x)) for x in (q, k, v)), 0)[0]
    assert 1e-3 < np.abs(from_bf16(got.out) - exact).max() < 0.3


def test_a_pool_of_fp8_caches_the_same_whether_codes_travelled_or_not(client):
    plain, codes = coded(client, name="codes-fp8", head_dim_k=128, kv_dtype="fp8_e4m3")
    random = np.random.default_rng(5)
    q = to_bf16(random.standard_normal((1, 4, 128), np.float32))
    k, v = (to_bf16(random.standard_normal((70, 2, 128), np.float32)) for _ in range(2))
    with plain.open() as a, codes.open() as b:
        plain.step(0, [(a, 0, 70)], k=k, v=v)
        codes.step(0, [(b, 0, 70)], k=k, v=v)
        outs = [plain.step(0, [(seq, 69, 1)], q) for seq in (a, b)]
    np.testing.assert_array_equal(outs[0].out, outs[1].out)


def test_a_large_step_travels_as_codes_in_pieces(client):
    plain, codes = coded(client, name="codes-large", n_blocks=2048, head_dim_k=128)
    n = 9000  # more than engine.max_step_tokens
    random = np.random.default_rng(6)
    k, v = (to_bf16(random.standard_normal((n, 2, 128), np.float32)) for _ in range(2))
    q = to_bf16(random.standard_normal((1, 4, 128), np.float32))
    with codes.open() as seq:
        codes.step(0, [(seq, 0, n)], k=k, v=v)
        got = from_bf16(plain.step(0, [(seq, n - 1, 1)], q).out)
    exact = attention(from_bf16(q), from_bf16(k), from_bf16(v), n - 1)[0]
    assert np.abs(got - exact).max() < 0.02


def test_codes_are_refused_where_there_are_none(client):
    spec = attnd.PoolSpec("codes-refused", 1, 4, 2, 32, n_blocks=16, q_dtype="bf16")
    for wire_dtype, q_dtype in (("fp8_e4m3", "f32"), ("fp8_e4m3", "f16"), ("int8", "bf16")):
        with pytest.raises(attnd.InvalidArgumentError, match=f"wire dtype {wire_dtype} and a pool"):
            client.create_pool(spec._replace(name=f"no-{q_dtype}", q_dtype=q_dtype), wire_dtype=wire_dtype)
    with pytest.raises(ValueError, match="wire_dtype is 'fp8'"):
        client.create_pool(spec, wire_dtype="fp8")
    if conftest.TRANSPORT == "shm":
        with pytest.raises(attnd.UnsupportedError, match="shared memory"):
            client.create_pool(spec, wire_dtype="fp8_e4m3")
    else:
        codes = client.create_pool(spec, wire_dtype="fp8_e4m3")
        q, k, v = map(to_bf16, qkv(3))
        with codes.open() as seq, pytest.raises(attnd.InvalidArgumentError, match="indices"):
            codes.step(0, [(seq, 0, 3)], q, k, v, indices=np.zeros((3, 1), np.int32))
        with codes.open() as seq:  # nothing was appended
            assert codes.step(0, [(seq, 0, 3)], q, k, v).out.shape == q.shape
