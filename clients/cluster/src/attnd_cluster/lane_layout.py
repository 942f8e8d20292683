"""Which lane has which rows of a plan, and how what they give is merged."""

from __future__ import annotations

from typing import Any, NamedTuple

import attnd
import torch
from attnd.torch import DTYPES

from .hosts import Host

Way = tuple[Host, bool]  # of a lane: where to, and whether its layers append


class Row(NamedTuple):
    """What one daemon has of an item."""

    seq: Any  # on that daemon
    version: int
    inner: attnd.Sequence
    pos: int
    n: int
    first: int  # the item's row


class Layout:
    """Which lane has which rows, and where its answers come: of plans that differ in positions alone.

    outs, lses  [rows of all lanes and one more, heads, dim], [..., heads]: one lane's behind another's, and
                a row of nothing
    parts       [most parts of a row, tokens]: of each row, which rows of outs are merged
    """

    def __init__(self, rows: dict[Way, list[int]], n: int, spec: attnd.PoolSpec, device: Any):
        n_rows = sum(map(len, rows.values()))
        heads, dim = spec.num_q_heads, spec.out_row
        self.rows, self.n = rows, n
        self.outs = torch.zeros((n_rows + 1, heads, dim), dtype=DTYPES[spec.q_dtype], device=device)
        self.lses = torch.full((n_rows + 1, heads), float("-inf"), device=device)
        found: list[list[int]] = [[] for _ in range(n)]
        self.spans: dict[Way, slice] = {}
        self.taken: dict[Way, torch.Tensor | None] = {}  # None: all, as they come
        at = 0
        for way, mine in rows.items():
            self.spans[way] = slice(at, at + len(mine))
            is_all = mine == list(range(n))
            self.taken[way] = None if is_all else torch.tensor(mine, device=device)
            for row in mine:
                found[row].append(at)
                at += 1
        most = max(map(len, found))
        padded = [x + [n_rows] * (most - len(x)) for x in found]
        self.parts = torch.tensor(padded, device=device).T.contiguous()

    def merge(self, out: torch.Tensor) -> None:
        weights = torch.softmax(self.lses[self.parts], dim=0)
        out.copy_((weights[..., None] * self.outs[self.parts].float()).sum(dim=0))
