"""attnd-cluster: what an operator asks of a whole cluster.

A program of its own, which `attnctl cluster` runs: attnctl is C and asks one daemon over one socket, so
that it runs where nothing else is installed. This one asks the registry, and agents by HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from . import __version__
from .balance import choose, gaps
from .keys import CONTROLLER, MEMBERS, QUOTAS, Member
from .operate import AgentError, Agents
from .registry import Registry, RegistryLost, open_registry

_SECONDS = 5.0


def members_of(registry: Registry) -> dict[str, Member]:
    found = registry.list(MEMBERS, _SECONDS).entries.values()
    return {m.name: m for m in map(Member.of_json, found)}


def table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def rows_of(members: dict[str, Member]) -> Iterator[list[str]]:
    yield ["MEMBER", "STATE", "POOL", "BLOCKS", "FREE", "SEQUENCES", "QUEUE us", "VERSION", "URL"]
    for m in sorted(members.values()):
        loads = [[name, *map(str, p)] for name, p in sorted((m.pools or {}).items())]
        for load in loads or [["-"] * 4]:
            yield [m.name, m.state, *load, f"{m.queue_seconds * 1e6:.0f}", m.version, m.url]


class Command:
    def __init__(self, o: argparse.Namespace):
        self.o = o
        self.registry = open_registry(o.registry)
        self.agents = Agents(o.token_file, o.ca_file)

    def member(self, name: str) -> Member:
        members = members_of(self.registry)
        if name not in members:
            raise AgentError(
                f"no member is named {name!r}: {', '.join(sorted(members)) or 'there are none'}"
            )
        return members[name]

    def find(self, id: int) -> tuple[Member, dict[str, Any]]:
        why = []
        for m in members_of(self.registry).values():
            try:
                for s in self.agents.sequences(m):
                    if int(s["sequence"]) == id:
                        return m, s
            except AgentError as e:
                why.append(str(e))
        raise AgentError("; ".join([f"no member has sequence {id}", *why]))

    def members(self) -> Any:
        members = members_of(self.registry)
        if self.o.json:
            return {"members": [json.loads(m.to_json()) for m in members.values()]}
        entries = (
            {} if self.registry.is_static else self.registry.list(CONTROLLER, _SECONDS).entries
        )
        leader = entries.get(CONTROLLER, b"nobody").decode()
        return table(list(rows_of(members))) + f"\ncontroller: {leader}"

    def top(self) -> Any:
        n = 0
        while self.o.count is None or n < self.o.count:
            if n:
                time.sleep(self.o.interval)
            n += 1
            print(self.members(), flush=True)
        return None

    def where(self) -> Any:
        member, sequence = self.find(self.o.sequence)
        if self.o.json:
            return {"member": member.name, **sequence}
        return f"{member.name} ({member.url}): pool {sequence['pool']}, {sequence['tokens']} tokens"

    def move(self) -> Any:
        member, _ = self.find(self.o.sequence)
        taker = self.agents.move(member, self.o.sequence, self.o.to)
        return {"sequence": str(self.o.sequence), "from": member.name, "to": taker}

    def evacuate(self) -> Any:
        return self.agents.ask(self.member(self.o.member), "/v1/evacuate", {})

    def rebalance(self) -> Any:
        for gap in gaps(members_of(self.registry)):
            source = self.member(gap.source)
            sequence = choose(gap, self.agents.sequences(source))
            if sequence is not None:
                taker = self.agents.move(source, int(sequence["sequence"]), gap.target)
                return {"sequence": sequence["sequence"], "from": gap.source, "to": taker}
        return {"moved": 0}

    def quotas(self) -> Any:
        if self.o.file is None:
            return json.loads(self.registry.list(QUOTAS, _SECONDS).entries.get(QUOTAS, b"{}"))
        with open(self.o.file, encoding="utf-8") as f:
            quotas = json.load(f)
        for tenant, limits in quotas.items():
            for quota, n in limits.items():
                if not isinstance(n, int) or n < 1:
                    raise ValueError(
                        f"{self.o.file}: {tenant}.{quota} is {n!r}, expected 1 or more"
                    )
        self.registry.put(QUOTAS, json.dumps(quotas).encode(), None, _SECONDS)
        return quotas


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="attnd-cluster", description="Looks at and operates a cluster."
    )
    p.add_argument(
        "--registry",
        default=os.environ.get("ATTND_REGISTRY"),
        help="etcd://HOST:PORT,.../PREFIX or file:///PATH ($ATTND_REGISTRY)",
    )
    p.add_argument("--token-file", help="what the agents' --token-file has")
    p.add_argument("--ca-file", help="CAs of https:// agents")
    p.add_argument("--json", action="store_true")
    p.add_argument("--version", action="version", version=f"attnd-cluster {__version__}")
    sub = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sub.add_parser("members", help="who is there, with pools and load")
    top = sub.add_parser("top", help="the same again and again")
    top.add_argument("--interval", type=float, default=1.0)
    top.add_argument("--count", type=int)
    where = sub.add_parser("where", help="which member has a sequence")
    where.add_argument("sequence", type=int)
    move = sub.add_parser("move", help="takes a sequence to a member, while it decodes")
    move.add_argument("sequence", type=int)
    move.add_argument("to", nargs="?", help="(the one with most room)")
    evacuate = sub.add_parser(
        "evacuate", help="a member takes nothing new and sends away what it has"
    )
    evacuate.add_argument("member")
    sub.add_parser("rebalance", help="moves one sequence from the fullest member to the emptiest")
    quotas = sub.add_parser("quotas", help="shows or sets quotas of tenants over the whole cluster")
    quotas.add_argument("file", nargs="?", help='{"TENANT": {"sequences": 1000}}')
    o = p.parse_args(argv)
    if o.registry is None:
        p.error("--registry or $ATTND_REGISTRY names the registry")
    try:
        result = getattr(Command(o), o.command)()
    except (AgentError, RegistryLost, NotImplementedError, ValueError, OSError) as e:
        print(f"attnd-cluster: {e}", file=sys.stderr)
        return 1
    if result is not None:
        print(result if isinstance(result, str) else json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
