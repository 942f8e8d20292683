"""attnd-controller: rebalances a cluster and divides its quotas. One works at a time, by a lease.

    leads      every --every seconds: one sequence of the fullest daemon moves to the emptiest, where
               the gap is wide; quotas of config/quotas are divided over the daemons by their use
    follows    waits for the leader's lease to end, and then takes its place within --ttl
    is away    nobody rebalances, the last shares hold; nothing else depends on it

With --http each of them serves GET /metrics: who is there, and how many daemons there should be, for
an autoscaler. Run two or three. SIGTERM, SIGINT: gives the lease up, so that another leads at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

from . import __version__, web
from .balance import choose, divide, gaps, replicas
from .keys import CONTROLLER, LEAVING, QUOTAS, SERVING, SHARES, Member
from .members import Members
from .operate import AgentError, Agents
from .registry import Lease, LeaseGone, RegistryLost, open_registry

log = logging.getLogger("attnd.controller")
_STAYS_SECONDS = 60.0
_TELLS_SECONDS = 15.0  # within which an agent tells its load, changed or not


class Controller:
    def __init__(self, options: argparse.Namespace):
        self.options = options
        self._registry = open_registry(options.registry)
        if self._registry.is_static:
            raise ValueError(
                f"{options.registry} has no leases: a controller needs etcd or the like"
            )
        self._members = Members(self._registry, idle=min(2.0, options.ttl))
        self._agents = Agents(options.token_file, options.ca_file)
        self._lease: Lease | None = None
        self._leads = False
        self._ends = threading.Event()
        self._shares: dict[str, bytes] = {}
        self._sent: dict[str, float] = {}  # sequences that were moved, and when
        self._looked_at: dict[str, tuple[Member, float]] = {}  # before their latest move
        self._work = threading.Thread(target=self._lead, name="attnd-controller", daemon=True)
        self._web: web.Web | None = None
        if options.http is not None:
            routes = {"GET /metrics": self._metrics, "GET /healthz": lambda _: web.text(200, "ok")}
            self._web = web.Web(options.http, routes, set())

    def run(self) -> None:
        """Until stop(): the lease, on this thread."""
        self._work.start()
        share = self.options.ttl / 3
        last_kept = 0.0
        while not self._ends.is_set():
            try:
                if self._lease is None:
                    self._lease = self._registry.grant(self.options.ttl, share)
                self._lease.keep(share)
                if not self._leads:
                    who = self.options.name.encode()
                    self._leads = self._registry.create(CONTROLLER, who, self._lease, share)
                    if self._leads:
                        log.info("%s leads", self.options.name)
                last_kept = time.monotonic()
            except LeaseGone:
                self._lease, self._leads = None, False
                continue
            except RegistryLost as e:
                # its own clock: another may lead when the lease could have ended
                if self._leads and time.monotonic() - last_kept > self.options.ttl / 2:
                    log.warning("registry lost, %s follows: %s", self.options.name, e)
                    self._leads = False
                    self._lease = None
            self._ends.wait(share)
        self._work.join(10)
        if self._lease is not None:
            try:
                self._lease.end(self.options.ttl)
            except RegistryLost as e:
                log.warning("the lease ends by itself: %s", e)
        if self._web is not None:
            self._web.close()
        self._members.close()

    def stop(self) -> None:
        self._ends.set()

    def _metrics(self, _: dict[str, Any]) -> web.Answer:
        if not self._members.is_known:  # none would tell an autoscaler to scale down
            return web.text(503, f"the registry was not read yet: {self._members.why or 'it starts'}")
        members = self._members.now()
        lines = [
            "# HELP attnd_cluster_members daemons that are registered",
            "# TYPE attnd_cluster_members gauge",
            *(
                f'attnd_cluster_members{{state="{s}"}} '
                + str(sum(m.state == s for m in members.values()))
                for s in (SERVING, LEAVING)
            ),
            "# HELP attnd_cluster_desired_replicas daemons that there should be, by blocks and queues",
            "# TYPE attnd_cluster_desired_replicas gauge",
            f"attnd_cluster_desired_replicas {replicas(members, self.options.fill, self.options.queue)}",
            "# HELP attnd_controller_leads 1: it rebalances and divides; 0: another does",
            "# TYPE attnd_controller_leads gauge",
            f"attnd_controller_leads {int(self._leads)}",
        ]
        return 200, "text/plain; version=0.0.4", ("\n".join(lines) + "\n").encode()

    # ---- what the leader does

    def _lead(self) -> None:
        while not self._ends.wait(self.options.every):
            if not self._leads or self._members.is_frozen:
                continue
            for what in (self._rebalance, self._divide):
                try:
                    what()
                except (AgentError, RegistryLost, LeaseGone) as e:
                    log.warning("%s", e)
                except Exception:
                    log.exception("controller")

    def _rebalance(self) -> None:
        """One move, between members that have told their load since the one before. A sequence stays
        for a while, so that its worker finds it where it was sent."""
        now = time.monotonic()
        self._sent = {id: at for id, at in self._sent.items() if now - at < _STAYS_SECONDS}
        members = {
            name: m
            for name, m in self._members.now().items()
            if self._looked_at.get(name, (None, 0.0))[0] != m
            or now - self._looked_at[name][1] > _TELLS_SECONDS
        }
        for gap in gaps(members):
            source = members[gap.source]
            listed = [s for s in self._agents.sequences(source) if s["sequence"] not in self._sent]
            sequence = choose(gap, listed)
            if sequence is None:
                continue
            taker = self._agents.move(source, int(sequence["sequence"]), gap.target)
            log.info("sequence %s of %s moved to %s", sequence["sequence"], gap.source, taker)
            self._sent[sequence["sequence"]] = now
            for name in (gap.source, gap.target):
                self._looked_at[name] = members[name], now
            return

    def _divide(self) -> None:
        entry = self._registry.list(QUOTAS, self.options.ttl).entries.get(QUOTAS)
        if entry is None:
            return
        quotas: dict[str, dict[str, int]] = json.loads(entry)
        used = {m.name: self._used(m) for m in self._members.now().values()}
        shares: dict[str, dict[str, dict[str, int]]] = {name: {} for name in used}
        for tenant, limits in quotas.items():
            for quota, total in limits.items():
                of = {name: u.get(tenant, {}).get(quota, 0) for name, u in used.items()}
                for name, part in divide(int(total), of).items():
                    shares[name].setdefault(tenant, {})[quota] = max(1, part)
        for name, share in shares.items():
            value = json.dumps(share, sort_keys=True).encode()
            if self._shares.get(name) != value:
                self._registry.put(SHARES + name, value, None, self.options.ttl)
                self._shares[name] = value

    def _used(self, member: Member) -> dict[str, dict[str, int]]:
        """By tenant and quota. Of an agent that does not answer: nothing, so that it keeps a part."""
        try:
            listed: list[dict[str, Any]] = self._agents.ask(member, "/v1/tenants")["tenants"]
        except AgentError as e:
            log.warning("%s", e)
            return {}
        return {
            t["tenant"]: {q: v for q, v in t.items() if isinstance(v, int) and q != "tenant"}
            for t in listed
        }


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="attnd-controller",
        description="Rebalances the daemons of a cluster and divides its quotas; one leads by a lease.",
    )
    p.add_argument("--registry", required=True, help="etcd://HOST:PORT,.../PREFIX")
    p.add_argument("--name", default=f"{os.uname().nodename}-{os.getpid()}", help="(%(default)s)")
    p.add_argument("--token-file", required=True, help="what the agents' --token-file has")
    p.add_argument("--ca-file", help="CAs of https:// agents")
    p.add_argument("--ttl", type=float, default=5.0, help="seconds of the lease (%(default)s)")
    p.add_argument("--every", type=float, default=2.0, help="seconds between looks (%(default)s)")
    p.add_argument("--http", help="HOST:PORT of /metrics and /healthz; none by default")
    p.add_argument(
        "--fill",
        type=float,
        default=0.8,
        help="of desired replicas: the part of its blocks that a pool should use (%(default)s)",
    )
    p.add_argument(
        "--queue",
        type=float,
        default=0.02,
        help="of desired replicas: seconds that steps should wait at most (%(default)s)",
    )
    p.add_argument("--version", action="version", version=f"attnd-controller {__version__}")
    o = p.parse_args(argv)
    if o.ttl < 1 or o.every <= 0:
        p.error("--ttl is 1 second or more, --every above 0")
    if not 0 < o.fill <= 1 or o.queue <= 0:
        p.error("--fill is above 0, 1 at most; --queue is above 0")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    try:
        controller = Controller(o)
    except (ValueError, OSError) as e:
        print(f"attnd-controller: {e}", file=sys.stderr)
        return 78
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: controller.stop())
    controller.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
