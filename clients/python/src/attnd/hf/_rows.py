"""The rows of a batch as sequences: which tokens of a forward pass are whose, opening and closing them.

A row is one sequence in each of the model's pools. What is opened or forked for several rows is there
as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Tuple

import torch

from ..errors import (
    AttndError,
    ConnectionLostError,
    NotFoundError,
    StaleEpochError,
    TimedOutError,
)
from ..pool import Items, Pool, Sequence

if TYPE_CHECKING:
    from ._cache import Cache
    from ._worker import Worker


Row = Tuple[Sequence, ...]  # one of each pool


def open_rows(
    pools: list[Pool], n: int, adapter: int = 0, tokens: Iterable[int] = ()
) -> list[Row]:
    """New rows, of no tokens, or of what the cache has of these."""
    rows: list[Row] = []
    opened: list[Sequence] = []
    try:
        for _ in range(n):
            for pool in pools:
                opened.append(pool.open(tokens=tokens, adapter=adapter))
            rows.append(tuple(opened[-len(pools) :]))
    except BaseException:
        close_all(opened)
        raise
    return rows


def fork_rows(rows: Iterable[Row]) -> list[Row]:
    """One of the same tokens for each."""
    new: list[Row] = []
    forks: list[Sequence] = []
    try:
        for row in rows:
            for seq in row:
                forks.append(seq.fork())
            new.append(tuple(forks[-len(row) :]))
    except BaseException:
        close_all(forks)
        raise
    return new


class Chunk(NamedTuple):
    """Packed tokens that one step takes, from `first` on; the step's items in each pool."""

    first: int
    items: tuple[Items, ...]


class Packed:
    """The tokens of one forward pass, packed: rows with their positions and numbers of tokens.

    chunks  the steps of a layer, within the daemon's limits
    """

    def __init__(self, runs: list[tuple[Row, int, int]], worker: Worker):
        self.chunks = list(_cut(runs, worker))


class Plan(Packed):
    """Which rows of one forward pass are real tokens of which sequence; the same in all layers.

    runs    (row, pos, n_tokens), in batch order; packed tokens are in this order
    index   indices of real tokens in [batch * new tokens], or None if all are
    """

    def __init__(self, cache: Cache, column: int, n_new: int, device: torch.device):
        self.column, self.n_new = column, n_new
        self.runs: list[tuple[Row, int, int]] = []
        keep: list[int] = []
        for i, (row, pad) in enumerate(zip(cache.rows, cache.pads)):
            n_padding = min(max(pad - column, 0), n_new)
            if n_padding < n_new:
                self.runs.append((row, max(column - pad, 0), n_new - n_padding))
                keep.extend(range(i * n_new + n_padding, (i + 1) * n_new))
        self.n_tokens = len(keep)
        is_padded = len(keep) < len(cache.rows) * n_new
        self.index = torch.tensor(keep, device=device) if is_padded else None
        super().__init__(self.runs, cache.worker)


def _cut(runs: list[tuple[Row, int, int]], worker: Worker) -> Iterator[Chunk]:
    first = begin = 0
    chunk: list[tuple[Row, int, int]] = []
    max_tokens = worker.step_tokens(sum(n_tokens for _, _, n_tokens in runs))
    for row, pos, n_tokens in runs:
        while n_tokens > 0:
            room = max_tokens - (begin - first)
            if room == 0 or len(chunk) == worker.max_items:
                yield Chunk(first, _items(chunk))
                first, chunk = begin, []
                continue
            n = min(n_tokens, room)
            chunk.append((row, pos, n))
            pos, n_tokens, begin = pos + n, n_tokens - n, begin + n
    if chunk:
        yield Chunk(first, _items(chunk))


def _items(runs: list[tuple[Row, int, int]]) -> tuple[Items, ...]:
    return tuple(
        seq.pool.items((row[i], pos, n) for row, pos, n in runs)
        for i, seq in enumerate(runs[0][0])
    )


def close_all(sequences: Iterable[Sequence]) -> None:
    """Closes each; raises the first failure after the last of them.

    What is gone is closed. A daemon that does not answer is asked once: leases end.
    """
    failed: AttndError | None = None
    for seq in sequences:
        try:
            seq.close()
        except (NotFoundError, StaleEpochError):
            pass
        except ConnectionLostError:
            break
        except TimedOutError as e:
            failed = failed or e
            break
        except AttndError as e:
            failed = failed or e
    if failed is not None:
        raise failed
