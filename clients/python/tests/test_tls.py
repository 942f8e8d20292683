"""Workers over tls+tcp:// with a tenant's token."""

import os
import pathlib
import socket
import subprocess

import attnd
import numpy as np
import pytest
from conftest import BUILD


class TlsDaemon:
    """attnd with keys of its own, at a port that was free."""

    def __init__(self, folder: pathlib.Path):
        keys = folder / "keys"
        make = [BUILD / "bin" / "attnctl", "keys", keys, "--host", "127.0.0.1"]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.url = f"tls+tcp://127.0.0.1:{s.getsockname()[1]}"
        self.ca_file, self.token_file = str(keys / "ca.crt"), str(keys / "workers.token")
        command = [BUILD / "bin" / "attnd", "--backend", "cpu", "--listen", self.url]
        command += ["--listen.http", "off", "--device.kv_memory", "64M", "--device.threads", "2"]
        command += ["--listen.tls_cert", keys / "server.crt", "--listen.tls_key", keys / "server.key"]
        command += ["--listen.tenants", keys / "tenants.conf"]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        os.environ["ATTND_CA_FILE"], os.environ["ATTND_KEY_FILE"] = self.ca_file, self.token_file
        attnd.connect(self.url, connect_timeout=60).close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    d = TlsDaemon(tmp_path_factory.mktemp("tls"))
    yield d
    d.process.terminate()
    assert d.process.wait(30) == 0


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
