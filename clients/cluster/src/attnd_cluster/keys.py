"""What is written in a registry.

    members/NAME       Member: a daemon that is there; under its agent's lease
    incarnations/NAME  its registration and those that this one goes on with; without a lease until
                       it leaves in order, then FATE_SECONDS. Its record is written only while this
                       is its own
    fates/REGISTRATION "dead", or "back:" and the registration that goes on with it; FATE_SECONDS
    roles/controller   who is the controller; under its lease
    config/quotas      quotas of tenants over the whole cluster, as an operator has put them
    shares/NAME        what of these is one daemon's

Members and roles end with their holders. A lease that ended does not yet say that a daemon is dead:
registries that were away themselves end leases, too. Whoever creates the fate decides. Those who saw
the lease end while the registry was there create it as "dead" at once and go elsewhere; those who
were without the registry, or away themselves, first wait GRACE_SECONDS for the agent. It creates it as "back" before it
registers again, and where it comes first nothing has happened. Where it finds "dead" it frees the
sequences that the daemon has.

From "back" to the registration's record an agent may take GRACE_SECONDS, and one that took longer
registers once more. So that registration is decided to be "dead" by those only who have waited for
it as long and do not find its record.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from .registry import Registry

MEMBERS = "members/"
INCARNATIONS = "incarnations/"
FATES = "fates/"
CONTROLLER = "roles/controller"
QUOTAS = "config/quotas"
SHARES = "shares/"

SERVING, LEAVING = "serving", "leaving"
DEAD, BACK = b"dead", b"back:"
FATE_SECONDS = 86400.0
GRACE_SECONDS = 10.0


def decide(registry: Registry, registration: str, fate: bytes, timeout: float) -> bytes:
    """The fate of a registration whose lease ended: the given one if nobody came first. Raises
    RegistryLost."""
    key = FATES + registration
    known = registry.list(key, timeout).entries.get(key)
    if known is not None:  # no lease is taken that nobody needs
        return known
    if registry.create(key, fate, registry.grant(FATE_SECONDS, timeout), timeout):
        return fate
    return registry.list(key, timeout).entries.get(key, fate)


class PoolLoad(NamedTuple):
    """A pool of a daemon, when its agent last looked."""

    n_blocks: int
    n_free_blocks: int  # or cached and evictable
    n_sequences: int


class Member(NamedTuple):
    """A daemon, as its agent registers it; of a static file only name, url and agent are known.

    url            for workers
    agent          http://HOST:PORT of its agent, "" where there is none
    registration   another each time that its agent registers it
    was            the registrations that this one goes on with
    boot_id        of the daemon's process; "" unknown
    state          serving; leaving: takes no new sequences and sends away those it has
    pools          by name; None: not known
    queue_seconds  that a step lately waited on average before its batch
    moved_to       where its latest moves went, by name, the latest last
    """

    name: str
    url: str
    agent: str = ""
    registration: str = ""
    was: tuple[str, ...] = ()
    boot_id: str = ""
    version: str = ""
    state: str = SERVING
    pools: dict[str, PoolLoad] | None = None
    queue_seconds: float = 0.0
    moved_to: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        return json.dumps({k: v for k, v in self._asdict().items() if v is not None}).encode()

    @classmethod
    def of_json(cls, value: bytes) -> Member:
        """Members that are not known here are left out. Raises ValueError, which says what is wrong."""
        try:
            d: dict[str, Any] = json.loads(value)
            pools = d.get("pools")
            if pools is not None:
                pools = {name: PoolLoad(*map(int, load)) for name, load in pools.items()}
            texts = {n: str(d.get(n, "")) for n in ("agent", "registration", "boot_id", "version")}
            if not (isinstance(d["name"], str) and isinstance(d["url"], str)):
                raise ValueError("name and url are texts")
            return cls(
                d["name"],
                d["url"],
                **texts,
                state=str(d.get("state", SERVING)),
                pools=pools,
                was=tuple(map(str, d.get("was", ()))),
                queue_seconds=float(d.get("queue_seconds", 0)),
                moved_to=tuple(map(str, d.get("moved_to", ()))),
            )
        except KeyError as e:
            raise ValueError(f"a member without {e}: {value[:200]!r}") from None
        except (TypeError, AttributeError) as e:
            raise ValueError(f"not a member: {value[:200]!r} ({e})") from None
