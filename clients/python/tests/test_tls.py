"""Workers over tls+tcp:// with a tenant's token."""

import os
import re
import socket
import subprocess

import attnd
import numpy as np
import pytest
from conftest import BUILD, Daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """An attnd with keys of its own; its url is the one for TLS."""
    keys = tmp_path_factory.mktemp("tls") / "keys"
    make = [BUILD / "bin" / "attnctl", "keys", keys, "--host", "127.0.0.1"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    settings = {
        "listen": f"tls+tcp://127.0.0.1:0 ipc://{keys.parent}/operator",
        "listen.tls_cert": keys / "server.crt",
        "listen.tls_key": keys / "server.key",
        "listen.tenants": keys / "tenants.conf",
        "device.kv_memory": "16M",
    }
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ATTND_CA_FILE", str(keys / "ca.crt"))
        environment.setenv("ATTND_KEY_FILE", str(keys / "workers.token"))
        with Daemon(**settings) as d:
            d.operator_url = f"ipc://{keys.parent}/operator"
            d.url = re.search(r"tls\+tcp://127\.0\.0\.1:[1-9]\d*", d.log.read_text())[0]
            yield d
            assert d.stop() == 0, d.log.read_text()


def spec(name: str) -> attnd.PoolSpec:
    return attnd.PoolSpec(name, 1, 4, 2, 32, n_blocks=64, q_dtype="f32")


def test_steps_are_right(daemon):
    rng = np.random.default_rng()
    q = rng.standard_normal((300, 4, 32), dtype=np.float32)
    k = rng.standard_normal((300, 2, 32), dtype=np.float32)
    v = rng.standard_normal((300, 2, 32), dtype=np.float32)
    with attnd.connect(daemon.url) as c, c.create_pool(spec("tls")) as pool, pool.open() as s:
        out = pool.step(0, [(s, 0, 300)], q, k, v).out
    kk, vv = np.repeat(k, 2, axis=1).astype(np.float64), np.repeat(v, 2, axis=1).astype(np.float64)
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), kk) / np.sqrt(32)
    scores[:, ~np.tri(300, dtype=bool)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), vv)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_a_tenant_sees_its_own_stats(daemon):
    with attnd.connect(daemon.url) as c:
        assert c.stats()["tenant"] == "workers"


def test_credentials_may_be_given_by_name(daemon, monkeypatch):
    files = {
        "token_file": os.environ["ATTND_KEY_FILE"],
        "ca_file": os.environ["ATTND_CA_FILE"],
    }
    monkeypatch.delenv("ATTND_KEY_FILE")
    monkeypatch.delenv("ATTND_CA_FILE")
    with attnd.connect(daemon.url, **files) as c:
        assert c.stats()["tenant"] == "workers"
    with pytest.raises(attnd.UnauthenticatedError, match="no token"):
        attnd.connect(daemon.url, ca_file=files["ca_file"])
    with pytest.raises(attnd.ConnectionLostError, match="unknown CA"):
        attnd.connect(daemon.url, token_file=files["token_file"], connect_timeout=1)


def test_a_token_of_nobody_is_refused(daemon, tmp_path):
    (tmp_path / "token").write_text("of nobody\n")
    with pytest.raises(attnd.UnauthenticatedError, match="hello.token is refused"):
        attnd.connect(daemon.url, token_file=str(tmp_path / "token"))


def resumed(d: Daemon) -> int:
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("ATTND_KEY_FILE")  # an operator's, of all tenants
        with attnd.connect(d.operator_url) as c:
            return c.stats()["tls_resumed_total"]


def test_a_cut_connection_is_made_again_by_a_ticket(daemon):
    n = resumed(daemon)
    port = int(daemon.url.rpartition(":")[2])
    before = set(os.listdir("/proc/self/fd"))
    with attnd.connect(daemon.url) as c:
        for _ in range(3):
            c.stats()
            mine = set(os.listdir("/proc/self/fd")) - before
            links = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in mine if os.path.exists(f"/proc/self/fd/{fd}")}
            for fd in (int(fd) for fd, link in links.items() if link.startswith("socket:")):
                with socket.socket(fileno=os.dup(fd)) as s:
                    if s.family == socket.AF_INET and s.getpeername()[1] == port:
                        s.shutdown(socket.SHUT_RDWR)
        c.stats()
    assert resumed(daemon) == n + 3
