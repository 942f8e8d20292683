"""What a controller decides: pure functions of members and sequences.

balance() moves a sequence where one daemon's pool is far fuller than another's; at most half of the
gap, and only where that is wide, so that nothing goes back and forth. divide() gives each daemon its
part of a quota over the whole cluster. replicas() says how many daemons there should be.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .keys import SERVING, Member

WIDE = 0.2  # of a pool's blocks: a gap that is worth a move


class Gap(NamedTuple):
    """Of one pool, from its fullest member to its emptiest."""

    pool: str
    source: str
    target: str
    n_blocks: int  # that may be moved: half of the gap


def gaps(members: dict[str, Member]) -> list[Gap]:
    """Those that are wide, the widest first."""
    found = []
    pools = {name for m in members.values() for name in m.pools or {}}
    for pool in pools:
        used = []
        for m in members.values():
            load = (m.pools or {}).get(pool)
            if m.state == SERVING and load is not None and load.n_blocks > 0:
                used.append((1 - load.n_free_blocks / load.n_blocks, m.name, load))
        if len(used) < 2:
            continue
        fullest, emptiest = max(used), min(used)
        gap = fullest[0] - emptiest[0]
        if gap > WIDE:
            n = int(gap / 2 * min(fullest[2].n_blocks, emptiest[2].n_blocks))
            found.append((gap, Gap(pool, fullest[1], emptiest[1], n)))
    return [g for _, g in sorted(found, reverse=True)]


def choose(gap: Gap, sequences: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The largest sequence that is not larger than the gap allows; None: there is none."""
    fitting = [s for s in sequences if s["pool"] == gap.pool and 0 < s["blocks"] <= gap.n_blocks]
    return max(fitting, key=lambda s: (not s.get("busy", False), s["blocks"]), default=None)


def replicas(members: dict[str, Member], fill: float, queue_seconds: float) -> int:
    """How many daemons there should be, at least 1: so many that pools have `fill` of their blocks in
    use, cached ones aside, and that steps wait no longer than queue_seconds on average. A queue asks
    for twice as many as there are at most: what it tells of is a moment's. Daemons whose load is not
    known count as full; those that leave count as none, and what they have is left out."""
    serving = [m for m in members.values() if m.state == SERVING]
    pools = {name for m in serving for name in m.pools or {}}
    wanted = [1.0]
    for pool in pools:
        of = [(m.pools or {}).get(pool) for m in serving]
        used = [1 - p.n_free_blocks / p.n_blocks for p in of if p is not None and p.n_blocks > 0]
        n_unknown = sum(m.pools is None for m in serving)
        wanted.append(sum(used) / fill + n_unknown)
    if serving:
        waited = sum(m.queue_seconds for m in serving) / len(serving)
        wanted.append(len(serving) * min(2.0, waited / queue_seconds))
    return math.ceil(max(wanted) - 1e-9)


def divide(total: int, used: dict[str, int]) -> dict[str, int]:
    """A quota over daemons: each has what it uses and an equal part of the rest, so that anybody can
    begin anywhere; where more is used than there is, parts are as the uses. The sum is total."""
    if not used:
        return {}
    n, sum_used = len(used), sum(used.values())
    if sum_used >= total:
        parts = {name: total * u // sum_used if sum_used else 0 for name, u in used.items()}
    else:
        parts = {name: u + (total - sum_used) // n for name, u in used.items()}
    for name in sorted(used, key=lambda name: (-used[name], name))[: total - sum(parts.values())]:
        parts[name] += 1
    return parts
