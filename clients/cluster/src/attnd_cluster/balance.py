"""What a controller decides: pure functions of members and sequences.

balance() moves a sequence where one daemon's pool is far fuller than another's; at most half of the
gap, and only where that is wide, so that nothing goes back and forth. divide() gives each daemon its
part of a quota over the whole cluster.
"""

from __future__ import annotations

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
