"""Many attnd behind one name.

    client = attnd.connect("cluster+etcd://10.0.0.1:2379/attnd")

What is where:

    registry/     etcd, Kubernetes or a file behind one interface: keys, leases, watches
    keys.py       what is written there: a record for each daemon
    members.py    who is there, as a watch tells; frozen while the registry is not
    hosts.py      a client for each member; what waits for one ends when it is gone
    place.py      which daemon a sequence goes to: pure functions
    client.py     connect(): pools (pool.py), steps over all daemons, sequences (sequence.py) that are
                  found again after a move, and made anew when their host is lost
    shards.py     a sequence over several daemons; shard_steps.py sends to all and merges, shard_decode.py
                  so for one token, with less of its own time
    torch.py      steps of sequences in shards by lanes, for workers on a GPU
    agent.py      attnd-agent, beside each daemon: registers it, its metrics, evacuation
    events.py     its block events as vLLM's KV events over ZeroMQ; blocks.py knows what is published
    controller.py attnd-controller, one by a lease: rebalances, divides quotas (balance.py decides)
    command.py    attnd-cluster, for operators
"""

from __future__ import annotations

from typing import Any

__version__ = "0.2.0"
__all__ = ["connect"]


def connect(url: str, **options: Any) -> Any:
    """attnd.connect() of a cluster+ url: a ClusterClient."""
    from .client import connect

    return connect(url, **options)
