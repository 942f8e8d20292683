"""Rows as they were: what lets a crop go back to where a pool with windows has freed its blocks.

Forks, made before passes that move a window over the end of a block; what a fork has is not freed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._rows import Row, close_all, fork_rows

if TYPE_CHECKING:
    from ._cache import Cache


class Saved:
    """Of one cache, from activate_past_recording() on."""

    def __init__(self, cache: Cache):
        self._cache = cache
        self._rows: list[tuple[int, list[Row]]] = []  # and how many columns they have
        seen, places = cache.worker.seen, cache.worker.pools.places
        windows: list[list[int]] = [[] for _ in cache.worker.pools.all]
        for layer, (pool, _) in places.items():
            windows[pool].append(seen[layer].window)
        # of pools with a layer that sees all, nothing is freed
        self._windows = [max(w) for w in windows if all(w)]

    def before(self, column: int, n_new: int) -> None:
        """Before a pass of n_new columns from this one on."""
        cache = self._cache
        if column > 0 and cache.is_even and self._firsts(column) != self._firsts(column + n_new):
            cache.worker.layers.wait()
            self._rows.append((column, fork_rows(cache.rows)))

    def _firsts(self, column: int) -> list[int]:
        """The first block that is in sight of the end, of each row and pool."""
        block_tokens = self._cache.worker.pool.spec.block_tokens
        ends = [column - pad + 1 for pad in self._cache.pads]
        return [max(end - n, 0) // block_tokens for end in ends for n in self._windows]

    def take(self, column: int) -> tuple[int, list[Row]] | None:
        """The shortest rows that have this column, and how many they have; they are the caller's."""
        i = next((i for i, (n, _) in enumerate(self._rows) if n >= column), None)
        return None if i is None else self._rows.pop(i)

    def forget(self) -> None:
        rows, self._rows = self._rows, []
        close_all(seq for _, of in rows for row in of for seq in row)
