"""The rows of a batch as sequences: which tokens of a forward pass are whose, and closing them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import (
    AttndError,
    ConnectionLostError,
    NotFoundError,
    StaleEpochError,
    TimedOutError,
)
from ..pool import Items, Sequence

if TYPE_CHECKING:
    from ._cache import Cache
    from ._worker import Worker


class Plan:
    """Which rows of one forward pass are real tokens of which sequence; the same in all layers.

    runs   (sequence, pos, n_tokens), in batch order; packed tokens are in this order
    index  indices of real tokens in [batch * new tokens], or None if all are
    """

    def __init__(self, cache: Cache, column: int, n_new: int, device: torch.device):
        self.column, self.n_new = column, n_new
        self.runs: list[tuple[Sequence, int, int]] = []
        keep: list[int] = []
        for row, (seq, pad) in enumerate(zip(cache.sequences, cache.pads)):
            n_padding = min(max(pad - column, 0), n_new)
            if n_padding < n_new:
                self.runs.append((seq, max(column - pad, 0), n_new - n_padding))
                keep.extend(range(row * n_new + n_padding, (row + 1) * n_new))
        self.n_tokens = len(keep)
        is_padded = len(keep) < len(cache.sequences) * n_new
        self.index = torch.tensor(keep, device=device) if is_padded else None
        self.chunks = list(self._chunks(cache.worker))

    def _chunks(self, worker: Worker) -> Any:
        """(first packed token, Items) of steps within the daemon's limits."""
        first = begin = 0
        runs: list[tuple[Sequence, int, int]] = []
        for seq, pos, n_tokens in self.runs:
            while n_tokens > 0:
                room = worker.max_tokens - (begin - first)
                if room == 0 or len(runs) == worker.max_items:
                    yield first, Items(runs)
                    first, runs = begin, []
                    continue
                n = min(n_tokens, room)
                runs.append((seq, pos, n))
                pos, n_tokens, begin = pos + n, n_tokens - n, begin + n
        if runs:
            yield first, Items(runs)


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
