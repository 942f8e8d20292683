"""What a worker of a cluster sees: sequences on three daemons, one of which is killed.

  demo.py CLUSTER_URL FOLDER     the folder has attndN.pid of hostN's daemon
"""

import os
import pathlib
import signal
import sys
import time

import attnd
import attnd_cluster
import numpy as np

SPEC = attnd.PoolSpec("demo", num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim_k=64, q_dtype="f32", n_blocks=64)
TABLE = np.random.default_rng(0).standard_normal((3, 50, 4, 64)).astype(np.float32)


def qkv(tokens):
    """A model so small that q, k and v follow from a token alone."""
    q, k, v = (TABLE[i, tokens] for i in range(3))
    return q, np.ascontiguousarray(k[:, :2]), np.ascontiguousarray(v[:, :2])


def rebuild(seq):
    tokens = seq.tokens[seq.n_cached :]
    print(f"  its host is lost: {len(tokens)} tokens computed anew on {seq.where}")
    _, k, v = qkv(tokens)
    seq.pool.step(0, [(seq, seq.n_cached, len(tokens))], k=k, v=v)


def decode(pool, seq):
    token, pos = len(seq.tokens) % 50, len(seq.tokens)
    seq.set_tokens(pos, [token])
    return pool.step(0, [(seq, pos, 1)], *qkv([token])).out


def main(url, folder):
    start = time.monotonic()
    with attnd_cluster.connect(url, rebuild=rebuild, connect_timeout=60) as client:
        if not client.members.wait(60, lambda now: len(now) == 3):
            sys.exit(f"only {sorted(client.members.now())} registered within 60 s")
        print(f"{len(client.members.now())} daemons registered, {time.monotonic() - start:.1f} s after the start")
        pool = client.create_pool(SPEC)
        sequences = []
        for i in range(6):
            prompt = [(i * 7 + j) % 50 for j in range(40)]
            seq = pool.open(tokens=prompt)
            pool.step(0, [(seq, seq.n_cached, 40 - seq.n_cached)], *qkv(prompt[seq.n_cached :]))
            sequences.append(seq)
        where = [s.where for s in sequences]
        print("sequences are on", *where)
        before = [decode(pool, s) for s in sequences]
        lost = where[0]
        os.kill(int(pathlib.Path(folder, f"attnd{lost[-1]}.pid").read_text()), signal.SIGKILL)
        print(f"{lost} is killed; each sequence decodes on:")
        start = time.monotonic()
        for seq, was, out in zip(sequences, where, before):
            q = qkv(seq.tokens[-1:])[0]
            same = pool.step(0, [(seq, len(seq.tokens) - 1, 1)], q).out
            assert np.abs(same - out).max() < 1e-5, "another output than before"
            decode(pool, seq)
            assert (was == lost) == (seq.where != was)
        print(f"{len(sequences)} sequences on {sorted({s.where for s in sequences})}, outputs as before, "
              f"{time.monotonic() - start:.1f} s after the kill")


main(*sys.argv[1:])
