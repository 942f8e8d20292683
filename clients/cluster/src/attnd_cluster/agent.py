"""attnd-agent: beside each daemon of a cluster, on its host.

It registers the daemon under a lease, serves its metrics and probes on an address, and sends its
sequences to other daemons when the host is to go. No step passes through it: if it dies the daemon
serves on, and if the registry is away it goes on asking.

    the daemon answers    the lease is kept, the record renewed when the load has changed
    it is silent          for --patience seconds: the lease is ended, so that workers go elsewhere
    it was declared dead  its sequences are freed before it registers again: they are made anew
                          elsewhere, and no old handle shall append to them
    the registry is away  nothing, but asking again: nobody is declared dead by that. In strict mode
                          (--fence, engine.fence) the daemon appends nothing until it is back

SIGTERM, SIGINT: takes no new sequences, sends away those that are there, unregisters, ends.
SIGUSR2: ends at once and leaves all as it is, for a newer agent to go on within the lease.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pathlib
import secrets
import signal
import sys
import threading
import time
from typing import Any

import attnd

from . import __version__, shares, web
from .daemon import LocalDaemon
from .evacuate import Mover
from .events import Events, parse_target
from .keys import (
    BACK,
    DEAD,
    FATE_SECONDS,
    GRACE_SECONDS,
    INCARNATIONS,
    LEAVING,
    MEMBERS,
    SERVING,
    SHARES,
    Member,
    decide,
)
from .members import Members
from .registry import Lease, LeaseGone, RegistryLost, open_registry

log = logging.getLogger("attnd.agent")
_RENEW_SECONDS = 10.0  # a record is written this often though nothing has changed
_STEPS_OF_LOAD = 50  # free blocks are told in steps of this part of a pool
_MOVED_TO = 8
_CHAIN = 32
_SHARES_SECONDS = 2.0


class Agent:
    def __init__(self, options: argparse.Namespace):
        self.options = options
        self._registry = open_registry(options.registry)
        every = min(1.0, options.ttl / 3)
        self._every = every
        self._daemon = LocalDaemon(options.endpoint, every, options.key_file)
        self._members = Members(self._registry, idle=min(2.0, options.ttl))
        self._mover = Mover(
            self._daemon.client,
            timeout=max(2.0, options.ttl),
            token_file=options.key_file,
            ca_file=options.ca_file,
        )
        self._moving = threading.Lock()
        self._state = SERVING
        self._moved_to: list[str] = []
        self._n_moved = 0
        self._n_retired = 0
        self._lease: Lease | None = None
        self._registration = ""
        self._was: tuple[str, ...] = ()
        self._told: Member | None = None
        self._told_at = self._kept_at = self._fenced_at = float("-inf")
        self._is_registry_there = False
        self._beat = time.monotonic()
        self._ends = threading.Event()
        self._evacuated = threading.Event()
        self._relay = web.Relay(options.metrics)
        self._web = web.Web(
            options.http,
            {
                "GET /healthz": self._healthz,
                "GET /readyz": self._readyz,
                "GET /metrics": self._metrics,
                "GET /v1/sequences": self._sequences,
                "GET /v1/tenants": self._tenants,
                "POST /v1/move": self._move,
                "POST /v1/evacuate": self._evacuate_by_http,
            },
            {"/v1/sequences", "/v1/tenants", "/v1/move", "/v1/evacuate"},
            options.token_file,
            options.tls_cert,
            options.tls_key,
        )
        self._events = Events(options.events, self._daemon.inspect) if options.events else None
        self._shares = b""
        self._look_for_shares_at = 0.0
        self._holder = threading.Thread(target=self._hold, name="attnd-lease", daemon=True)

    def start(self) -> None:
        if self.options.evacuated_file is not None:  # of an agent before
            pathlib.Path(self.options.evacuated_file).unlink(missing_ok=True)
        self._daemon.start()
        if self._events is not None:
            self._events.start()
        if not self._registry.is_static:
            self._holder.start()

    # ---- the lease, on a thread of its own

    def _hold(self) -> None:
        while not self._ends.wait(self._every if self._lease is not None else 0.2):
            self._turn(self.options.ttl / 3)

    def _turn(self, share: float) -> None:
        """What is to be done now. share: seconds that each request may take."""
        self._beat = time.monotonic()
        try:
            if self._daemon.silent_for() > self.options.patience:
                self._let_go()
            elif self._lease is None:
                self._register(share)
            else:
                if time.monotonic() - self._kept_at >= share:
                    now = time.monotonic()  # the lease counts from before it was asked for
                    self._lease.keep(share)
                    self._kept_at = now
                    self._renew_fence()
                self._tell(share)
                self._apply_shares(share)
            self._is_registry_there = True
        except LeaseGone as e:
            log.warning("not registered any more: %s", e)
            self._lease = None
        except RegistryLost as e:
            if self._is_registry_there:
                log.warning("registry lost, going on: %s", e)
            self._is_registry_there = False
        except attnd.AttndError as e:
            log.warning("daemon: %s", e)
        except Exception:
            log.exception("lease")

    def _let_go(self) -> None:
        """Of a daemon that does not answer, so that nobody waits for it."""
        if self._lease is None:
            return
        if self._fenced_for() > 0:
            return  # it may be only its answers that do not come
        log.error("the daemon is silent for %.1f s: unregistered", self._daemon.silent_for())
        self._lease.end(self.options.ttl / 3)
        self._lease = None

    def _register(self, timeout: float) -> None:
        name = self.options.name
        incarnation_key = INCARNATIONS + name
        before = self._registry.list(incarnation_key, timeout).entries.get(incarnation_key)
        self._registration, self._was = secrets.token_hex(8), ()
        since = time.monotonic()
        if before is not None and not self._goes_on_with(before.decode().split(), timeout):
            n = self._daemon.retire()
            self._n_retired += n
            if n > 0:
                log.warning("it was declared dead: %d sequences freed before it registers", n)
        now = time.monotonic()
        lease = self._registry.grant(self.options.ttl, timeout)
        record = self._record()
        # before anybody sees the record: should this agent end in between, or not get that far, the
        # next registration knows of it, and of those before, which workers may have seen last. Only
        # in the place of what was read: else an agent that was late would hide another's
        if before is not None:
            held = incarnation_key, before
            self._registry.put(incarnation_key, self._incarnation(), None, timeout, held)
        elif not self._registry.create(incarnation_key, self._incarnation(), None, timeout):
            raise LeaseGone(f"{incarnation_key} was written by another agent")
        self._put(record, lease, timeout)
        if time.monotonic() - since >= GRACE_SECONDS:
            raise LeaseGone(f"registering took {GRACE_SECONDS:g} s and more, and so once more")
        self._lease, self._told = lease, record
        self._told_at = self._kept_at = now
        self._renew_fence()
        log.info("registered as %s, lease of %g s", name, lease.ttl)

    def _incarnation(self) -> bytes:
        return " ".join((self._registration, *self._was)).encode()

    def _put(self, record: Member, lease: Lease | None, timeout: float) -> None:
        """One that arrives late, when another registration has come, is not written."""
        held = INCARNATIONS + record.name, self._incarnation()
        self._registry.put(MEMBERS + record.name, record.to_json(), lease, timeout, held)

    def _apply_shares(self, timeout: float) -> None:
        """What the controller has given this daemon of the cluster's quotas."""
        if self.options.tenants is None or time.monotonic() < self._look_for_shares_at:
            return
        self._look_for_shares_at = time.monotonic() + _SHARES_SECONDS
        key = SHARES + self.options.name
        value = self._registry.list(key, timeout).entries.get(key)
        if value is None or value == self._shares:
            return
        try:
            if shares.apply(self.options.tenants, json.loads(value)):
                self._daemon.client().reload()
                log.info("shares: %s", value.decode())
            self._shares = value
        except (OSError, ValueError) as e:
            log.error("shares: %s", e)

    def _renew_fence(self) -> None:
        """Strict mode: the daemon appends only while its lease can't have ended."""
        fence, now = self.options.fence, time.monotonic()
        if fence is not None and now + fence <= self._kept_at + self.options.ttl:
            self._fenced_at = now  # whether or not it is answered
            self._daemon.fence(now)

    def _fenced_for(self) -> float:
        """Seconds for which the daemon may still append in strict mode; else 0."""
        fence = self.options.fence
        return 0.0 if fence is None else max(0.0, self._fenced_at + fence - time.monotonic())

    def _goes_on_with(self, before: list[str], timeout: float) -> bool:
        """What was registered before, by this agent or another, goes on under the new registration, and
        so do those that it went on with; False: it was declared dead."""
        was, *chain = before
        while was != self._registration:  # others may have come so far and then ended
            fate = decide(self._registry, was, BACK + self._registration.encode(), timeout)
            if fate == DEAD:
                return False
            chain.insert(0, was)
            was = fate[len(BACK) :].decode()
        self._was = tuple(chain[:_CHAIN])
        return True

    def _record(self) -> Member:
        look = self._daemon.last
        assert look is not None
        return Member(
            self.options.name,
            self.options.url,
            self.options.advertise or f"http://{self.options.http}",
            self._registration,
            self._was,
            look.boot_id,
            look.version,
            self._state if look.is_ready else LEAVING,
            look.pools,
            look.queue_seconds,
            tuple(self._moved_to),
        )

    def _tell(self, timeout: float) -> None:
        """The record, where it says something new."""
        now = self._record()
        is_late = time.monotonic() - self._told_at > _RENEW_SECONDS
        if self._told is None or is_late or _gist(self._told) != _gist(now):
            self._put(now, self._lease, timeout)
            self._told, self._told_at = now, time.monotonic()

    # ---- evacuation

    def evacuate(self, seconds: float) -> None:
        """Sends away what there is, until nothing is left, for so long at most."""
        self._state = LEAVING
        until, n_left = time.monotonic() + seconds, 0
        # Other workers see it within a renewal; what they open until then is sent away, too. No
        # drain that is held: it ends the daemon once it is empty, and workers that come for what
        # has moved would wait for its end as a member instead of being told at once.
        while True:
            try:
                left = list(self._daemon.sequences())
            except attnd.AttndError as e:
                log.warning("evacuation: %s", e)
                left = None  # as many as before, for all that is known
            if left == []:
                log.info("evacuated: %d sequences moved", self._n_moved)
                return
            moved = sum(self._move_one(s, None) is not None for s in left or ())
            n_left = n_left if left is None else len(left)
            if time.monotonic() > until:
                log.error("evacuation ends after %g s, %d sequences are left", seconds, n_left)
                return
            if moved == 0:
                self._ends.wait(self._every)

    def _move_one(self, sequence: dict[str, Any], to: str | None) -> str | None:
        with self._moving:
            taker = self._mover.move(sequence, self._members.now(), self.options.name, to)
            if taker is not None:
                self._n_moved += 1
                if taker in self._moved_to:
                    self._moved_to.remove(taker)
                self._moved_to = [*self._moved_to, taker][-_MOVED_TO:]
            return taker

    def leave(self) -> None:
        """SIGTERM: in order, so that workers need not wait for the lease."""
        self.evacuate(self.options.evacuate)
        self.stop(is_leaving=True)
        if self._lease is not None:
            ttl = self.options.ttl
            try:
                self._tell(ttl)  # where all went, for who comes later
                time.sleep(self._fenced_for())
                # what was opened here meanwhile is made anew elsewhere: freed, should it return
                forgotten = self._registry.grant(FATE_SECONDS, ttl)
                held = INCARNATIONS + self.options.name, self._incarnation()
                self._registry.put(*held, forgotten, ttl, held)
                self._lease.end(ttl)
            except (RegistryLost, LeaseGone) as e:
                log.warning("not unregistered, the lease ends: %s", e)
        self._registry.close()
        if self.options.evacuated_file is not None:
            pathlib.Path(self.options.evacuated_file).touch()

    def stop(self, is_leaving: bool = False) -> None:
        """Ends its threads; the lease goes on."""
        self._ends.set()
        if self._holder.is_alive():
            self._holder.join(10)
        if self._events is not None:
            self._events.close(is_leaving)
        self._web.close()
        self._mover.close()
        self._daemon.close()
        self._members.close()

    # ---- HTTP

    def _healthz(self, _: dict[str, Any]) -> web.Answer:
        silent = time.monotonic() - self._beat
        if not self._registry.is_static and silent > 10 * self.options.ttl:
            return web.text(503, f"the lease's thread shows no life for {silent:.0f} s")
        return web.text(200, "ok")

    def _readyz(self, _: dict[str, Any]) -> web.Answer:
        look, silent = self._daemon.last, self._daemon.silent_for()
        if look is None or silent > self.options.patience:
            return web.text(503, "the daemon does not answer")
        if not look.is_ready:
            return web.text(503, "the daemon is not ready, or drains")
        if self._state != SERVING:
            return web.text(503, "leaving")
        return web.text(200, "ok" if self._is_registry_there else "ok, without the registry")

    def _metrics(self, _: dict[str, Any]) -> web.Answer:
        own = {
            "attnd_agent_registered": ("gauge", int(self._lease is not None)),
            "attnd_agent_registry_there": ("gauge", int(self._is_registry_there)),
            "attnd_agent_members": ("gauge", len(self._members.now())),
            "attnd_agent_members_frozen": ("gauge", int(self._members.is_frozen)),
            "attnd_agent_daemon_silent_seconds": ("gauge", self._daemon.silent_for()),
            "attnd_agent_sequences_moved_total": ("counter", self._n_moved),
            "attnd_agent_sequences_retired_total": ("counter", self._n_retired),
            **(self._events.counts() if self._events is not None else {}),
        }
        lines = [f"# TYPE {n} {kind}\n{n} {value}\n" for n, (kind, value) in own.items()]
        page = self._relay.read() + "".join(lines).encode()
        return 200, "text/plain; version=0.0.4; charset=utf-8", page

    def _sequences(self, _: dict[str, Any]) -> web.Answer:
        return web.json_answer(200, {"sequences": list(self._daemon.sequences())})

    def _tenants(self, _: dict[str, Any]) -> web.Answer:
        return web.json_answer(200, self._daemon.client().inspect("tenants"))

    def _move(self, body: dict[str, Any]) -> web.Answer:
        id, to = int(body["sequence"]), body.get("to")
        for sequence in self._daemon.sequences():
            if int(sequence["sequence"]) == id:
                taker = self._move_one(sequence, to)
                if taker is None:
                    return web.json_answer(409, {"error": f"{to or 'nobody'} takes sequence {id}"})
                return web.json_answer(200, {"sequence": str(id), "to": taker})
        return web.json_answer(404, {"error": f"no sequence {id} here"})

    def _evacuate_by_http(self, body: dict[str, Any]) -> web.Answer:
        seconds = float(body.get("seconds", self.options.evacuate))
        threading.Thread(target=self.evacuate, args=(seconds,), daemon=True).start()
        return web.json_answer(202, {"state": LEAVING})


def _gist(m: Member) -> Any:
    """What of a record has to differ for others to be told: loads in steps."""
    pools = {
        name: (p.n_blocks, p.n_free_blocks * _STEPS_OF_LOAD // max(1, p.n_blocks))
        for name, p in (m.pools or {}).items()
    }
    queue = max(0.0, m.queue_seconds)
    return m._replace(pools=None, queue_seconds=0), pools, len(f"{int(queue * 1e6):b}")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="attnd-agent",
        description="Registers an attnd of this host in a cluster, serves its metrics and probes,"
        " and sends its sequences away when the host is to go (SIGTERM).",
    )
    p.add_argument("--registry", required=True, help="etcd://HOST:PORT,.../PREFIX or file:///PATH")
    p.add_argument("--name", default=os.uname().nodename, help="of the member (the host's name)")
    p.add_argument("--url", required=True, help="of the daemon for workers, as tls+tcp://HOST:PORT")
    p.add_argument(
        "--endpoint",
        default="ipc:///run/attnd/attnd.sock.admin",
        help="the daemon's admin socket (%(default)s)",
    )
    p.add_argument("--http", default="127.0.0.1:9471", help="HOST:PORT to serve (%(default)s)")
    p.add_argument("--advertise", help="url of --http for others (http://, then --http)")
    p.add_argument("--tls-cert", help="of --http: serves https")
    p.add_argument("--tls-key")
    p.add_argument(
        "--token-file", help="a token in its first line: who may list and move over HTTP"
    )
    p.add_argument(
        "--metrics", help="the daemon's page, as http://127.0.0.1:9470/metrics (not relayed)"
    )
    p.add_argument(
        "--fence",
        type=float,
        metavar="SECONDS",
        help="strict mode, of a daemon with this engine.fence: it appends only while its lease is kept",
    )
    p.add_argument(
        "--tenants", help="the daemon's listen.tenants, into which its shares of quotas are written"
    )
    p.add_argument(
        "--events",
        action="append",
        default=[],
        metavar="POOL=PUB[,REPLAY[,TOPIC]]",
        help="publishes the pool's block events as vLLM's KV events over ZeroMQ, as"
        " llama=tcp://*:5557,tcp://*:5558,kv@pod-1@llama; TENANT/POOL where there are tenants."
        " For several pools give it several times",
    )
    p.add_argument("--ttl", type=float, default=3.0, help="seconds of the lease (%(default)s)")
    p.add_argument(
        "--patience",
        type=float,
        help="seconds for which a daemon may be silent before it is unregistered (--ttl)",
    )
    p.add_argument(
        "--evacuate",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long sending sequences away may take (%(default)s)",
    )
    p.add_argument(
        "--evacuated-file", help="made when it has left, for who waits to stop the daemon"
    )
    p.add_argument("--key-file", help="the tenant's token, for daemons that want one")
    p.add_argument("--ca-file", help="CAs of tls+tcp:// daemons")
    p.add_argument("--verbose", action="store_true")
    p.add_argument("--version", action="version", version=f"attnd-agent {__version__}")
    o = p.parse_args(argv)
    try:
        o.events = [parse_target(text) for text in o.events]
    except ValueError as e:
        p.error(f"--events: {e}")
    if o.ttl < 1:
        p.error(f"--ttl is {o.ttl:g}, expected 1 or more seconds")
    o.patience = o.ttl if o.patience is None else o.patience
    if o.patience < min(1.0, o.ttl / 3):
        p.error(f"--patience is {o.patience:g}, expected {min(1.0, o.ttl / 3):g} or more seconds")
    if o.fence is not None and not 0 < o.fence <= o.ttl * 2 / 3:
        p.error(f"--fence is {o.fence:g}, expected at most two thirds of --ttl, {o.ttl * 2 / 3:g}")
    if (o.tls_cert is None) != (o.tls_key is None):
        p.error("--tls-cert and --tls-key come together")
    return o


def main(argv: list[str] | None = None) -> int:
    o = arguments(argv)
    logging.basicConfig(
        level=logging.DEBUG if o.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # of all threads
    try:
        agent = Agent(o)
    except (ValueError, OSError, ImportError) as e:
        print(f"attnd-agent: {e}", file=sys.stderr)
        return 78
    agent.start()
    log.info("%s on %s, registry %s", o.name, o.http, o.registry)
    if signal.sigwait(signals) == signal.SIGUSR2:
        agent.stop()
        return 75
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # a second one ends it
    agent.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
