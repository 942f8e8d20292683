#!/usr/bin/env python3
"""A client written from docs/protocol.md and docs/protocol/ alone: sockets and bytes, no SP library, no protobuf, no libattn.

    stranger.py ATTND      starts the daemon on an ipc and a tcp address and holds it to them

Field numbers are those of proto/attnd.proto. Attention is recomputed in plain Python floats by the
formula of docs/protocol/steps.md. Exit 0 if everything is as written there.
"""
import math
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile

OK, EINVAL, ENOTFOUND, EEXIST, ESTALE, ENOTSUP, EPROTO, ENOWEIGHTS = 0, -1, -2, -3, -8, -10, -15, -21
APPEND, ATTEND, LSE = 1, 2, 4
F32 = 1
HEADS, KV_HEADS, DK, DV, LAYERS = 4, 2, 8, 16, 2


# --- protobuf by hand ---------------------------------------------------------------------------


def varint(n):
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def uint(field, n):
    return varint(field << 3) + varint(n)


def fixed64(field, n):
    return varint(field << 3 | 1) + struct.pack("<Q", n)


def float32(field, x):
    return varint(field << 3 | 5) + struct.pack("<f", x)


def blob(field, body):
    body = body.encode() if isinstance(body, str) else body
    return varint(field << 3 | 2) + varint(len(body)) + body


def floats(field, values):
    return blob(field, struct.pack("<%df" % len(values), *values))


def read_varint(b, at):
    n = shift = 0
    while True:
        n |= (b[at] & 0x7F) << shift
        shift += 7
        at += 1
        if b[at - 1] < 0x80:
            return n, at


def zigzag(n):
    return n >> 1 ^ -(n & 1)


def fields(b):
    """{field: value}; bytes for anything with a length"""
    out, at = {}, 0
    while at < len(b):
        tag, at = read_varint(b, at)
        if tag & 7 == 0:
            value, at = read_varint(b, at)
        else:
            n = {1: 8, 5: 4}.get(tag & 7)
            if n is None:
                n, at = read_varint(b, at)
            value, at = b[at : at + n], at + n
        out[tag >> 3] = value
    return out


def packed_varints(b):
    out, at = [], 0
    while at < len(b):
        n, at = read_varint(b, at)
        out.append(n)
    return out


# --- messages -----------------------------------------------------------------------------------


def message(request_id, header, payload=b"", version=1, flags=0):
    b = struct.pack("<4sHHIIQ", b"ATND", version, flags, len(header), len(payload), request_id)
    b += header
    return b + bytes(-len(b) % 64) + payload


def taken_apart(b):
    """(request id, fields of the header, payload) of a reply"""
    magic, version, flags, n_header, n_payload, request_id = struct.unpack_from("<4sHHIIQ", b)
    assert (magic, version, flags) == (b"ATND", 1, 1)
    head = (24 + n_header + 63) // 64 * 64
    assert len(b) == head + n_payload and not any(b[24 + n_header : head])
    return request_id, fields(b[24 : 24 + n_header]), b[head:]


# --- sockets ------------------------------------------------------------------------------------


class Connection:
    def __init__(self, address):
        self.is_ipc = isinstance(address, str)
        self.s = socket.socket(socket.AF_UNIX if self.is_ipc else socket.AF_INET)
        self.s.settimeout(300)
        self.s.connect(address)
        self.s.sendall(bytes.fromhex("00535000 0030 0000"))
        assert self.read(8) == bytes.fromhex("00535000 0031 0000")
        self.next_id = random.getrandbits(30)

    def read(self, n):
        out = b""
        while len(out) < n:
            more = self.s.recv(n - len(out))
            if not more:
                raise EOFError("the daemon closed the connection")
            out += more
        return out

    def send_raw(self, body, stack=None):
        if stack is None:
            stack = [0x80000000 | random.getrandbits(31)]
        b = b"".join(struct.pack(">I", word) for word in stack) + body
        self.s.sendall((b"\1" if self.is_ipc else b"") + struct.pack(">Q", len(b)) + b)
        return stack

    def receive(self, stack=None):
        """(request id, fields of the header, payload)"""
        if self.is_ipc:
            assert self.read(1) == b"\1"
        b = self.read(struct.unpack(">Q", self.read(8))[0])
        at = 0
        while not b[at] & 0x80:
            at += 4
        at += 4
        if stack is not None:
            assert list(struct.unpack(">%dI" % len(stack), b[:at])) == stack
        return taken_apart(b[at:])

    def send(self, header, payload=b"", request_id=None, **how):
        if request_id is None:
            self.next_id += 1
            request_id = self.next_id
        return request_id, self.send_raw(message(request_id, header, payload, **how))

    def call(self, header, payload=b"", **how):
        request_id, stack = self.send(header, payload, **how)
        got_id, reply, out = self.receive(stack)
        assert got_id == request_id
        return reply, out


def status(reply):
    return zigzag(reply.get(1, 0))


def expect(reply, wanted, words=""):
    message = reply.get(2, b"").decode()
    assert status(reply) == wanted, (status(reply), wanted, message)
    assert words in message, message
    assert (wanted == OK) == (message == ""), message


# --- attention ----------------------------------------------------------------------------------

PLAIN = {}
RICH = {"scale": 0.3, "window": 4, "sinks": 1, "cap": 2.5, "logits": [0.5, -1, 0, 2], "slopes": [0.5, 0.25, 0, 0.125]}
SPECS = [PLAIN, RICH]


def layer_spec(s):
    out = b""
    if s:
        out += float32(1, s["scale"]) + uint(2, s["window"]) + uint(3, s["sinks"]) + float32(4, s["cap"])
        out += floats(6, s["logits"]) + floats(7, s["slopes"])
    return out


def attend(spec, q, p, k, v, h):
    """One query head at position p over rows k, v of its kv head: (out, lse)."""
    kv = h // (HEADS // KV_HEADS)
    terms = []
    for j in range(p + 1):
        if spec and not (j > p - spec["window"] or j < spec["sinks"]):
            continue
        s = spec.get("scale", 1 / math.sqrt(DK)) * sum(a * b for a, b in zip(q, k[j][kv]))
        if spec:
            s = spec["cap"] * math.tanh(s / spec["cap"]) + spec["slopes"][h] * (j - p)
        terms.append((math.exp(s), v[j][kv]))
    z = sum(w for w, _ in terms) + (math.exp(spec["logits"][h]) if spec else 0)
    return [sum(w * row[d] for w, row in terms) / z for d in range(DV)], math.log(z)


def rows(n, heads, dim):
    to_f32 = lambda x: struct.unpack("<f", struct.pack("<f", x))[0]
    return [[[to_f32(random.gauss(0, 1)) for _ in range(dim)] for _ in range(heads)] for _ in range(n)]


def flat(t):
    values = [x for row in t for head in row for x in head]
    return struct.pack("<%df" % len(values), *values)


class Worker:
    def __init__(self, connection, pool_name, token=""):
        self.c = connection
        hello = blob(10, uint(1, 1) + blob(2, "stranger") + blob(6, token))
        reply, _ = self.c.call(hello)
        expect(reply, OK)
        self.hello = fields(reply[10])
        assert self.hello[1] == 1
        self.session = struct.unpack("<Q", self.hello[2])[0]
        spec = blob(1, pool_name) + uint(2, LAYERS) + uint(3, HEADS) + uint(4, KV_HEADS)
        spec += uint(5, DK) + uint(6, DV) + uint(8, 64) + uint(9, F32)
        self.spec = spec + b"".join(blob(12, layer_spec(s)) for s in SPECS)
        reply, _ = self.call(blob(11, blob(1, self.spec)))
        expect(reply, OK)
        self.pool = fields(reply[11])[1]

    def call(self, body, payload=b"", **how):
        return self.c.call(fixed64(1, self.session) + uint(2, 10_000_000) + body, payload, **how)

    def step(self, layer, items, flags, q=None, k=None, v=None):
        """items: (seq, epoch, pos, n_tokens). (reply, out rows, lse rows)"""
        body = uint(1, self.pool) + uint(2, layer) + uint(3, flags) + uint(4, F32)
        body += blob(5, b"".join(struct.pack("<Q", i[0]) for i in items))
        for field, column in ((6, 1), (7, 2), (8, 3)):
            body += blob(field, b"".join(varint(i[column]) for i in items))
        payload = b""
        for t in [q] * (flags >> 1 & 1) + [k, v] * (flags & 1):
            payload += bytes(-len(payload) % 64) + flat(t)
        reply, out = self.call(blob(18, body), payload)
        n = sum(i[3] for i in items)
        n_out = n * HEADS * DV * 4 if flags & ATTEND else 0
        if 13 not in reply:
            assert out == b""
            return reply, None, None
        lse_at = (n_out + 63) // 64 * 64
        assert len(out) == (lse_at + n * HEADS * 4 if flags & LSE else n_out)
        o = struct.unpack("<%df" % (n_out // 4), out[:n_out])
        lse = struct.unpack("<%df" % (n * HEADS), out[lse_at:]) if flags & LSE else None
        return reply, o, lse


def check_rows(spec, q, first_pos, k, v, out, lse, row0=0):
    for t in range(len(q)):
        for h in range(HEADS):
            want, want_lse = attend(spec, q[t][h], first_pos + t, k, v, h)
            at = ((row0 + t) * HEADS + h) * DV
            assert all(abs(a - b) < 1e-4 for a, b in zip(want, out[at : at + DV])), (t, h)
            assert lse is None or abs(want_lse - lse[(row0 + t) * HEADS + h]) < 1e-4


# --- what the page says -------------------------------------------------------------------------


def sequences_and_steps(w):
    seq, other = random.getrandbits(64), random.getrandbits(64)
    open_id = 77
    for _ in range(2):  # repeated: the same answer
        reply, _ = w.call(blob(13, fixed64(1, seq) + uint(2, w.pool)), request_id=open_id)
        expect(reply, OK)
        assert fields(reply[12]) == {1: 1, 2: w.pool}
    reply, _ = w.call(blob(13, fixed64(1, seq) + uint(2, w.pool)))
    expect(reply, EEXIST)

    cache = []  # per layer
    for layer in range(LAYERS):
        q, k, v = rows(6, HEADS, DK), rows(6, KV_HEADS, DK), rows(6, KV_HEADS, DV)
        for _ in range(2):  # a chunk of a prompt, and the same again
            reply, out, lse = w.step(layer, [(seq, 1, 0, 6)], APPEND | ATTEND | LSE, q, k, v)
            expect(reply, OK)
            check_rows(SPECS[layer], q, 0, k, v, out, lse)
        for p in range(6, 20):  # decode, past a block's edge
            q1, k1, v1 = rows(1, HEADS, DK), rows(1, KV_HEADS, DK), rows(1, KV_HEADS, DV)
            k, v = k + k1, v + v1
            reply, out, lse = w.step(layer, [(seq, 1, p, 1)], APPEND | ATTEND, q1, k1, v1)
            expect(reply, OK)
            check_rows(SPECS[layer], q1, p, k, v, out, lse)
        cache.append((k, v))

    # attend alone, several tokens; and one beyond the end
    q = rows(3, HEADS, DK)
    reply, out, lse = w.step(0, [(seq, 1, 17, 3)], ATTEND | LSE, q)
    expect(reply, OK)
    check_rows(PLAIN, q, 17, *cache[0], out, lse)
    reply, out, _ = w.step(0, [(seq, 1, 18, 3)], ATTEND, q)
    expect(reply, EINVAL, "item 0")

    # fork; the copy goes its own way, the source keeps its bytes
    fork = fixed64(1, seq) + uint(2, 1) + fixed64(3, other) + uint(4, 13) + uint(5, 1)
    reply, _ = w.call(blob(14, fork))
    expect(reply, OK)
    assert packed_varints(fields(reply[12])[3]) == [13, 13]
    q, k1, v1 = rows(2, HEADS, DK), rows(2, KV_HEADS, DK), rows(2, KV_HEADS, DV)
    items = [(seq, 1, 20, 1), (other, 1, 13, 1)]
    reply, out, lse = w.step(0, items, APPEND | ATTEND | LSE, q, k1, v1)
    expect(reply, OK)
    k, v = cache[0]
    check_rows(PLAIN, q[:1], 20, k + k1[:1], v + v1[:1], out, lse, 0)
    check_rows(PLAIN, q[1:], 13, k[:13] + k1[1:], v[:13] + v1[1:], out, lse, 1)

    # one item leaves a gap: it alone fails, its rows are NaN
    items = [(seq, 1, 21, 1), (other, 1, 15, 1)]
    reply, out, lse = w.step(0, items, APPEND | ATTEND | LSE, q, k1, v1)
    expect(reply, EINVAL, "item 1")
    assert [zigzag(s) for s in packed_varints(fields(reply[13])[1])] == [OK, EINVAL]
    assert all(math.isnan(x) for x in out[HEADS * DV :]) and all(math.isnan(x) for x in lse[HEADS:])
    check_rows(PLAIN, q[:1], 21, k + k1[:1] + k1[:1], v + v1[:1] + v1[:1], out, lse, 0)

    reply, _ = w.call(blob(15, fixed64(1, seq) + uint(2, 1) + uint(3, 20)))  # truncate
    expect(reply, OK)
    assert fields(reply[12])[1] == 2  # the epoch rises
    reply, _, _ = w.step(0, [(seq, 1, 20, 1)], APPEND, None, k1[:1], v1[:1])
    expect(reply, ESTALE)
    reply, _, _ = w.step(0, [(seq, 2, 21, 1)], APPEND, None, k1[:1], v1[:1])
    expect(reply, EINVAL)
    return seq, other


def prefixes(w, other_worker):
    """What one worker has computed the other begins with; blocks are of 16 tokens."""
    ids = [random.getrandbits(32) for _ in range(20)]
    seq, other, third = (random.getrandbits(64) for _ in range(3))

    def opening(name, n, adapter):
        body = fixed64(1, name) + uint(2, w.pool) + blob(3, b"".join(varint(i) for i in ids[:n]))
        return blob(13, body + fixed64(4, adapter))

    def told(first, tokens):
        body = fixed64(1, seq) + uint(2, epoch) + uint(3, first)
        return blob(24, body + blob(4, b"".join(varint(i) for i in tokens)))

    reply, _ = w.call(opening(seq, 10, 7))
    expect(reply, OK)
    epoch = fields(reply[12])[1]
    assert 4 not in fields(reply[12])
    cache = []
    for layer in range(LAYERS):
        k, v = rows(20, KV_HEADS, DK), rows(20, KV_HEADS, DV)
        cache.append((k, v))
        expect(w.step(layer, [(seq, epoch, 0, 20)], APPEND, None, k, v)[0], OK)
    expect(w.call(told(11, ids[11:]))[0], EINVAL, "pos 11")
    expect(w.call(told(9, [ids[9] ^ 1]))[0], EINVAL, "token 9")
    expect(w.call(told(8, ids[8:]))[0], OK)
    expect(w.call(told(8, ids[8:]))[0], OK)
    reply, _ = other_worker.call(opening(third, 20, 8))
    assert 4 not in fields(reply[12])  # another adapter's
    reply, _ = other_worker.call(opening(other, 20, 7))
    expect(reply, OK)
    got = fields(reply[12])
    assert got[4] == 16
    for layer, (k, v) in enumerate(cache):
        q = rows(4, HEADS, DK)
        item = [(other, got[1], 16, 4)]
        reply, out, lse = other_worker.step(layer, item, APPEND | ATTEND | LSE, q, k[16:], v[16:])
        expect(reply, OK)
        check_rows(SPECS[layer], q, 16, k, v, out, lse)


def adoption(w, other_worker, seq):
    reply, _ = other_worker.call(blob(17, fixed64(1, seq)))
    expect(reply, OK)
    got = fields(reply[12])
    assert got[1] == 3 and packed_varints(got[3]) == [20, 20]
    q = rows(1, HEADS, DK)
    reply, _, _ = w.step(0, [(seq, 2, 19, 1)], ATTEND, q)
    expect(reply, ESTALE)
    reply, _, _ = other_worker.step(0, [(seq, 3, 19, 1)], ATTEND, q)
    expect(reply, OK)
    for epoch, wanted in ((2, ESTALE), (3, OK), (3, ENOTFOUND)):
        reply, _ = other_worker.call(blob(16, fixed64(1, seq) + uint(2, epoch)))  # close
        expect(reply, wanted)


def refusals(w, token=""):
    c = w.c
    expect(c.call(blob(21, b""))[0], ENOTFOUND, "session")
    expect(w.call(blob(19, b""))[0], ENOTFOUND, "sequence 0")
    expect(w.call(blob(20, b""))[0], ENOTFOUND, "sequence 0")
    expect(w.call(blob(60, b""))[0], ENOTSUP, "field 60")
    expect(w.call(b"")[0], EPROTO, "body")
    expect(w.call(blob(21, b""), b"x" * 64)[0], EPROTO, "payload")
    expect(w.call(blob(21, b"") + uint(3, 1) + blob(9, b"\0\xff"))[0], OK)  # unknown fields
    expect(w.call(blob(12, blob(1, b"a\0b")))[0], EPROTO, "pool_describe.name")
    expect(w.call(blob(12, blob(1, "no such pool")))[0], ENOTFOUND)
    expect(w.call(blob(21, b""), version=2)[0], ENOTSUP, "version")
    expect(w.call(blob(21, b""), flags=2)[0], ENOTSUP, "flags")
    expect(c.call(blob(10, uint(1, 1) + blob(3, "levitation") + blob(6, token)))[0], ENOTSUP, "levitation")
    expect(w.call(blob(11, blob(1, w.spec + blob(14, "levitation"))))[0], ENOTSUP, "levitation")
    expect(w.call(blob(11, blob(1, w.spec + blob(13, blob(1, "other weights")))))[0], EEXIST)
    expect(w.call(blob(11, blob(1, w.spec)))[0], OK)
    reply, _ = w.call(blob(21, b""), request_id=0)
    expect(reply, EPROTO, "request id")
    stack = c.send_raw(b"not a message at all, but framed as one")
    request_id, reply, _ = c.receive(stack)
    assert request_id == 0
    expect(reply, EPROTO, "magic")
    # the connection lived through all of that
    reply, _ = w.call(blob(21, b""))
    expect(reply, OK)
    assert fields(reply[14])[1].strip().startswith(b"{")
    reply, _ = c.call(blob(10, uint(1, 1) + fixed64(4, w.session) + blob(6, token)))
    expect(reply, OK)
    assert struct.unpack("<Q", fields(reply[10])[2])[0] == w.session


def many_in_flight(w):
    waiting = set()
    header = fixed64(1, w.session) + blob(12, blob(1, "p"))
    for _ in range(64):
        waiting.add(w.c.send(header)[0])
    while waiting:
        request_id, reply, _ = w.c.receive()
        expect(reply, OK)
        waiting.remove(request_id)


def ids_of_devices(w):
    header = fixed64(1, w.session) + blob(12, blob(1, "p"))
    # words of devices in front come back as they were
    stack = [7, 0x7FFFFFFF] + [1] * 13 + [0x80000001]
    w.c.send_raw(message(5, header), stack)
    request_id, reply, _ = w.c.receive(stack)
    assert request_id == 5
    expect(reply, OK)


def projections(w):
    """A pool whose steps carry heads, one of them, and refuse to until its layer has weights."""
    latent, rope, nope, out_dim, n = 16, 8, 8, 8, 3
    spec = blob(1, "heads") + uint(2, 1) + uint(3, 1) + uint(4, 1) + uint(5, latent + rope) + uint(6, latent)
    spec += uint(8, 4) + uint(9, F32) + blob(12, float32(1, 0.25)) + uint(16, 1)
    features = blob(14, "v_in_k") + blob(14, "projections")
    for given, says in ((uint(17, nope), "out_dim is 0"), (uint(17, nope) + uint(18, 12), "out_dim is 12")):
        expect(w.call(blob(11, blob(1, spec + features + given)))[0], EINVAL, says)
    reply, _ = w.call(blob(11, blob(1, spec + features + uint(17, nope) + uint(18, out_dim))))
    expect(reply, OK)
    pool, seq = fields(reply[11])[1], random.getrandbits(64)
    reply, _ = w.call(blob(13, fixed64(1, seq) + uint(2, pool)))
    expect(reply, OK)
    epoch = fields(reply[12])[1]
    weights, q, k = rows(1, nope + out_dim, latent), rows(n, 1, nope + rope), rows(n, 1, latent + rope)
    payload = flat(q)
    payload += bytes(-len(payload) % 64) + flat(k)
    step = uint(1, pool) + uint(3, APPEND | ATTEND) + uint(4, F32) + blob(5, struct.pack("<Q", seq))
    step = blob(18, step + blob(6, varint(epoch)) + blob(7, varint(0)) + blob(8, varint(n)))

    def send(offset, piece, pool=pool, layer=0):
        body = blob(43, uint(1, pool) + uint(2, layer) + uint(3, offset))
        reply, out = w.call(body, piece)
        assert out == b""
        return reply

    bytes_of = flat(weights)
    expect(w.call(step, payload)[0], ENOWEIGHTS, "layer 0 of pool heads has 0 of its 1024 bytes of weights")
    expect(send(0, b""), EINVAL, "0 bytes, a piece has 1 to 1048576")
    expect(send(0, bytes((1 << 20) + 1)), EINVAL, "1048577 bytes")
    expect(send(0, bytes_of[:4], pool=w.pool), EINVAL, "has no projections")
    expect(send(0, bytes_of[:4], pool=12345), ENOTFOUND, "12345")
    expect(send(0, bytes_of[:4], layer=1), EINVAL, "weights.layer is 1, the pool has 1 layers")
    expect(send(4, bytes_of[4:]), EINVAL, "bytes 4 to 1024, 0 of 1024 are there")
    expect(send(0, bytes_of + b"more"), EINVAL, "bytes 0 to 1028")
    expect(send(0, bytes_of[:600]), OK)
    expect(send(0, bytes_of[:600]), OK)  # again
    expect(w.call(step, payload)[0], ENOWEIGHTS, "600 of its 1024")
    expect(send(592, bytes(16)), EEXIST, "layer 0 has other weights in bytes 592 to 600")
    expect(send(500, bytes_of[500:]), OK)
    expect(send(0, bytes_of), OK)
    expect(w.call(step, payload[4:])[0], EINVAL, "payload has")
    for _ in range(2):
        reply, out = w.call(step, payload)
        expect(reply, OK)
        got = struct.unpack("<%df" % (n * out_dim), out)
        for t in range(n):
            wide = [sum(q[t][0][i] * weights[0][i][c] for i in range(nope)) for c in range(latent)]
            wide += q[t][0][nope:]
            terms = [(math.exp(0.25 * sum(a * b for a, b in zip(wide, k[j][0]))), k[j][0]) for j in range(t + 1)]
            z = sum(e for e, _ in terms)
            mean = [sum(e * row[c] for e, row in terms) / z for c in range(latent)]
            for i in range(out_dim):
                want = sum(m * x for m, x in zip(mean, weights[0][nope + i]))
                assert abs(want - got[t * out_dim + i]) < 1e-3 * (1 + abs(want)), (t, i)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(command, folder):
    """The daemon, once it says as to systemd that it listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as news:
        news.bind(folder + "/news")
        news.settimeout(300)
        daemon = subprocess.Popen(command, env={**os.environ, "NOTIFY_SOCKET": folder + "/news"})
        try:
            while b"READY=1" not in news.recv(4096):
                pass
        except OSError:
            daemon.kill()
            raise
    return daemon


def main():
    seed = random.randrange(1 << 32)
    random.seed(seed)
    print("seed", seed)
    with tempfile.TemporaryDirectory() as folder:
        path, port = folder + "/attnd.sock", free_port()
        command = [sys.argv[1], "--backend", "cpu", "--device.kv_memory", "16M", "--cache.io_memory", "64M"]
        command += ["--listen", "ipc://" + path, "--listen", "tcp://127.0.0.1:%d" % port]
        command += ["--listen.http", "off", "--config", os.devnull]
        daemon = start(command, folder)
        try:
            w = Worker(Connection(path), "p")
            other = Worker(Connection(("127.0.0.1", port)), "p")
            assert w.pool == other.pool and w.session != other.session
            seq, _ = sequences_and_steps(w)
            sequences_and_steps(other)
            prefixes(w, other)
            adoption(w, other, seq)
            refusals(w)
            refusals(other)
            for worker in w, other:
                many_in_flight(worker)
                ids_of_devices(worker)
            projections(other)
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(300) == 0
        finally:
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()
    print("the daemon keeps to docs/protocol.md")


if __name__ == "__main__":
    main()
