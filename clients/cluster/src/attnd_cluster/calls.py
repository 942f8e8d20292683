"""Several requests on sequences of a cluster: as attnd.Calls, carried out where each sequence is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import attnd

if TYPE_CHECKING:
    from .pool import ClusterPool
    from .sequence import ClusterSequence


class ClusterCalls:
    """One after the other: each may be for another daemon, and find its sequence moved."""

    def __init__(self, pool: ClusterPool):
        self._pool = pool
        self._asked: list[Callable[[float | None], Any]] = []

    def __len__(self) -> int:
        return len(self._asked)

    def open(
        self, seq_id: int | None = None, *, tokens: Iterable[int] = (), adapter: int = 0
    ) -> None:
        ids = list(tokens)
        self._asked.append(
            lambda t: self._pool.open(seq_id, tokens=ids, adapter=adapter, timeout=t)
        )

    def adopt(self, seq_id: int) -> None:
        self._asked.append(lambda t: self._pool.adopt(seq_id, timeout=t))

    def fork(
        self, seq: ClusterSequence, new_id: int | None = None, n_tokens: int | None = None
    ) -> None:
        self._asked.append(lambda t: seq.fork(new_id, n_tokens, timeout=t))

    def set_tokens(self, seq: ClusterSequence, pos: int, tokens: Iterable[int]) -> None:
        ids = list(tokens)
        self._asked.append(lambda t: seq.set_tokens(pos, ids, timeout=t))

    def truncate(self, seq: ClusterSequence, n_tokens: int) -> None:
        def truncate(t: float | None) -> ClusterSequence:
            seq.truncate(n_tokens, timeout=t)
            return seq

        self._asked.append(truncate)

    def commit(self, seq: ClusterSequence, nodes: Iterable[int]) -> None:
        path = list(nodes)

        def commit(t: float | None) -> ClusterSequence:
            seq.commit(path, timeout=t)
            return seq

        self._asked.append(commit)

    def close(self, seq: ClusterSequence) -> None:
        self._asked.append(lambda t: seq.close(timeout=t))

    def probe(self, tokens: Iterable[int], *, adapter: int = 0) -> None:
        ids = list(tokens)
        self._asked.append(lambda t: self._pool.probe(ids, adapter=adapter, timeout=t))

    def run(self, *, timeout: float | None = None) -> list[Any]:
        """One entry per call: what it gives, or the AttndError that it alone would have raised."""
        asked, self._asked = self._asked, []
        done: list[Any] = []
        for call in asked:
            try:
                done.append(call(timeout))
            except attnd.AttndError as e:
                done.append(e)
        return done
