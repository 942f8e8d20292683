"""What an agent knows of its daemon and asks of it, over the admin socket.

A thread looks every `every` seconds, so that a daemon that is stopped holds up nobody else. Calls
end within their timeouts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import attnd

from .keys import PoolLoad

log = logging.getLogger("attnd.agent")


class Look(NamedTuple):
    boot_id: str
    version: str
    is_ready: bool
    pools: dict[str, PoolLoad]
    queue_seconds: float
    n_sequences: int


class LocalDaemon:
    """endpoint: the admin socket, or another Unix socket as root or the daemon's user."""

    def __init__(self, endpoint: str, every: float, token_file: str | None = None):
        self._endpoint, self._every, self._token_file = endpoint, every, token_file
        self._timeout = max(0.2, 2 * every)
        self._client: attnd.Client | None = None
        self._lock = threading.Lock()  # of _client
        self._waited: tuple[float, float] | None = None  # steps' total wait, their number
        self._ends = threading.Event()
        self.last: Look | None = None
        self.last_at = float("-inf")  # monotonic, when it answered
        self._thread = threading.Thread(target=self._run, name="attnd-daemon", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def silent_for(self) -> float:
        """Seconds since it answered."""
        return time.monotonic() - self.last_at

    def close(self) -> None:
        self._ends.set()
        self._thread.join(2 * self._timeout + 5)
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    def client(self) -> attnd.Client:
        """Connected, its session there. Raises AttndError."""
        with self._lock:
            if self._client is None:
                self._client = attnd.connect(
                    self._endpoint,
                    timeout=self._timeout,
                    name="attnd-agent",
                    token_file=self._token_file,
                )
            return self._client

    def _ask(self, what: Any) -> Any:
        """what(client); once more with a new session where the daemon has begun anew."""
        client = self.client()
        try:
            return what(client)
        except attnd.SessionGoneError:
            client.reopen()
            return what(client)

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                look = self._ask(self._look)
                self.last, self.last_at = look, time.monotonic()
            except attnd.AttndError as e:
                log.debug("daemon: %s", e)
            self._ends.wait(self._every)

    def _look(self, client: attnd.Client) -> Look:
        stats = client.stats()
        listed = client.inspect("pools")["pools"]
        pools = {p["name"]: PoolLoad(p["blocks"], p["free_blocks"], p["sequences"]) for p in listed}
        of_all = stats.get("step_queue_seconds", {}).values()
        waited = sum(h["sum"] for h in of_all), sum(h["count"] for h in of_all)
        before, self._waited = self._waited, waited
        queue = 0.0
        if before is not None and waited[1] > before[1]:
            queue = (waited[0] - before[0]) / (waited[1] - before[1])
        info = client._read_info()
        return Look(
            f"{info.boot_id:x}",
            stats["version"],
            bool(stats.get("ready")) and not stats.get("draining"),
            pools,
            queue,
            sum(p.n_sequences for p in pools.values()),
        )

    def sequences(self) -> Iterator[dict[str, Any]]:
        """All that are open, as inspect lists them. Raises AttndError."""
        after = 0
        while True:
            page = self.inspect("sequences", after)
            yield from page["sequences"]
            after = int(page.get("next", 0))
            if after == 0:
                return

    def inspect(self, topic: str, after: int) -> dict[str, Any]:
        """A page of a list. Raises AttndError."""
        return self._ask(lambda client: client.inspect(topic, after))

    def fence(self, since: float) -> None:
        """Lets it append for engine.fence from then on, by time.monotonic(). Raises AttndError."""
        self._ask(lambda client: client.fence(since=since))

    def retire(self) -> int:
        """Frees every sequence, since this daemon was declared dead while it had them: they are made
        anew elsewhere, and whoever comes with an old handle is to be refused. Says how many.

        Freed and not retired (attnd.Client.retire), which leaves them to be adopted: their blocks
        would be taken until sessions end, and `stale epoch` says that a sequence is another worker's.
        """
        n = 0
        for s in list(self.sequences()):
            try:
                self._ask(lambda client: client.kill_sequence(int(s["sequence"]), s.get("tenant")))
                n += 1
            except attnd.NotFoundError:
                pass  # closed meanwhile
        return n
