#!/usr/bin/env python3
"""The same client (stranger.py) over a real nng: a REQ socket at a tls+tcp:// address, with a tenant's token.

    stranger_nng.py BIN_DIR      pynng where it is installed, and the system's libnng

Then what nng must refuse, or is refused: a daemon of another CA or another name, a listener that asks for a
certificate, a hello without a token or with a wrong one. Exit 0 if everything is as written; 77: there is no nng.
"""
import ctypes
import ctypes.util
import os
import random
import signal
import subprocess
import sys
import tempfile

import stranger
from stranger import ENOTFOUND, OK, blob, expect, fixed64, fields, uint

EAUTH = -9
WAIT_MS = 60000

try:
    import pynng
except ImportError:
    pynng = None


def read(path):
    with open(path) as f:
        return f.read()


class Refused(Exception):
    """nng has no connection."""


class Pynng:
    """A REQ socket of pynng; requests that are outstanding together have contexts of their own."""

    version = "1.3"

    def __init__(self, url, ca, name, cert=None):
        tls = pynng.TLSConfig(
            pynng.TLSConfig.MODE_CLIENT,
            server_name=name,
            ca_string=read(ca),
            auth_mode=pynng.TLSConfig.AUTH_MODE_REQUIRED,
        )
        if cert:
            tls.set_own_cert(read(cert + ".crt"), read(cert + ".key"))
        self.socket = pynng.Req0(recv_timeout=WAIT_MS, send_timeout=WAIT_MS, recv_max_size=1 << 26)
        self.socket.tls_config = tls
        try:
            self.socket.dial(url, block=True)
        except pynng.exceptions.NNGException as e:
            self.socket.close()
            raise Refused(str(e)) from e
        self.waiting = []

    def send(self, body):
        context = self.socket.new_context()
        context.send(body)
        self.waiting.append(context)
        return context

    def receive(self, context):
        context = context or self.waiting[0]
        self.waiting.remove(context)
        with context:
            return context.recv()

    def close(self):
        self.socket.close()


class Libnng:
    """The system's libnng; Debian's has no TLS 1.3. A REQ socket has one request outstanding: more have more."""

    version = "1.2"
    lib = None

    def __init__(self, url, ca, name, cert=None):
        self.how = (url, ca, name, cert)
        self.idle, self.waiting = [], []
        self.idle.append(self.open())

    @classmethod
    def is_there(cls):
        path = ctypes.util.find_library("nng")
        cls.lib = ctypes.CDLL(path) if path else None
        return path is not None

    def do(self, function, *args):
        rc = getattr(self.lib, function)(*args)
        if rc != 0:
            raise Refused(f"{function}: {rc}")

    def open(self):
        url, ca, name, cert = self.how
        s, d, tls = ctypes.c_uint32(), ctypes.c_uint32(), ctypes.c_void_p()
        self.do("nng_req0_open", ctypes.byref(s))
        for option in b"recv-timeout", b"send-timeout":
            self.do("nng_socket_set_ms", s, option, ctypes.c_int32(WAIT_MS))
        self.do("nng_socket_set_size", s, b"recv-size-max", ctypes.c_size_t(1 << 26))
        self.do("nng_tls_config_alloc", ctypes.byref(tls), 0)  # a client's
        self.do("nng_tls_config_ca_file", tls, ca.encode())
        self.do("nng_tls_config_server_name", tls, name.encode())
        self.do("nng_tls_config_auth_mode", tls, 2)  # required
        if cert:
            self.do("nng_tls_config_own_cert", tls, read(cert + ".crt").encode(), read(cert + ".key").encode(), None)
        self.do("nng_dialer_create", ctypes.byref(d), s, url.encode())
        self.do("nng_dialer_set_ptr", d, b"tls-config", tls)
        try:
            self.do("nng_dialer_start", d, 0)
        except Refused:
            self.lib.nng_close(s)
            raise
        return s

    def send(self, body):
        s = self.idle.pop() if self.idle else self.open()
        self.do("nng_send", s, body, ctypes.c_size_t(len(body)), 0)
        self.waiting.append(s)
        return s

    def receive(self, s):
        s = s or self.waiting[0]
        self.waiting.remove(s)
        p, n = ctypes.c_void_p(), ctypes.c_size_t()
        self.do("nng_recv", s, ctypes.byref(p), ctypes.byref(n), 1)  # into memory of nng's
        body = ctypes.string_at(p, n.value)
        self.lib.nng_free(p, n)
        self.idle.append(s)
        return body

    def close(self):
        for s in self.idle + self.waiting:
            self.lib.nng_close(s)


class Connection(stranger.Connection):
    """nng writes lengths and ids itself."""

    def __init__(self, nng):
        self.nng = nng
        self.next_id = random.getrandbits(30)

    def send_raw(self, body, stack=None):
        return self.nng.send(body)

    def receive(self, stack=None):
        return stranger.taken_apart(self.nng.receive(stack))


def refused(kind, *how):
    """There is no connection, or none on which anything is answered."""
    try:
        nng = kind(*how)
    except Refused:
        return
    nng.close()
    raise AssertionError(f"{how} is not refused")


def hold_to_the_page(kind, bin_dir, folder):
    keys, foreign, port = folder + "/keys", folder + "/foreign", stranger.free_port()
    make = [bin_dir + "/attnctl", "keys"]
    for where, host in (keys, "localhost"), (foreign, "localhost"):
        subprocess.run([*make, where, "--host", host, "--tenant", "alpha"], check=True, stdout=subprocess.DEVNULL)
    command = [bin_dir + "/attnd", "--backend", "cpu", "--device.kv_memory", "16M", "--cache.io_memory", "64M"]
    command += ["--listen", f"tls+tcp://127.0.0.1:{port}", "--listen.tls_min_version", kind.version]
    command += ["--listen.tls_cert", keys + "/server.crt", "--listen.tls_key", keys + "/server.key"]
    command += ["--listen.tls_ca", keys + "/ca.crt", "--listen.tls_client_cert", "optional"]
    command += ["--listen.tenants", keys + "/tenants.conf", "--listen.http", "off", "--config", os.devnull]
    # a machine that is busy may be late with hello
    command += ["--listen.handshake_timeout", "1m"]
    daemon = stranger.start(command, folder)
    url, ca, token = f"tls+tcp://127.0.0.1:{port}", keys + "/ca.crt", read(keys + "/alpha.token").strip()
    try:
        c = Connection(kind(url, ca, "localhost"))
        hello = uint(1, 1) + blob(2, "nobody")
        expect(c.call(blob(10, hello))[0], EAUTH, "hello has no token")
        expect(c.call(blob(10, hello + blob(6, token[:-1])))[0], EAUTH, "hello.token is refused")
        expect(c.call(fixed64(1, 99) + blob(21, b""))[0], ENOTFOUND, "session")
        w = stranger.Worker(c, "p", token)
        other = stranger.Worker(Connection(kind(url, ca, "localhost")), "p", token)
        seq, _ = stranger.sequences_and_steps(w)
        stranger.prefixes(w, other)
        stranger.adoption(w, other, seq)
        stranger.refusals(w, token)
        stranger.many_in_flight(w)
        # whom a certificate names needs no token
        certified = Connection(kind(url, ca, "localhost", keys + "/alpha"))
        reply, _ = certified.call(blob(10, hello))
        expect(reply, OK)
        assert fields(reply[10])[1] == 1
        refused(kind, url, foreign + "/ca.crt", "localhost")
        refused(kind, url, ca, "elsewhere.example")
        for each in w.c, other.c, certified:
            each.nng.close()
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(300) == 0
    finally:
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait()
    print(kind.__name__, "keeps to docs/protocol.md, as the daemon does")


def main():
    kinds = ([Pynng] if pynng else []) + ([Libnng] if Libnng.is_there() else [])
    seed = random.randrange(1 << 32)
    random.seed(seed)
    print("seed", seed)
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            hold_to_the_page(kind, sys.argv[1], folder)
    sys.exit(0 if kinds else 77)


if __name__ == "__main__":
    main()
