"""Steps of sequences that have shards: what goes to each, all at once, and what is merged of it.

The shard that has a query's place appends and attends, those before it attend as parts
(docs/protocol/step-kinds.md, "Parts"), and outputs are merged by their lse (attn_merge).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import attnd
import numpy as np
from attnd._lib import library
from attnd._tensor import F32, address_of
from attnd.errors import check

from .pool import ClusterItems, ClusterPool, _Arrays, together
from .sequence import ClusterSequence
from .shards import LongSequence, ShardRange


class Row(NamedTuple):
    """An item, or a span of one, of a long sequence or of any other."""

    item: int
    seq: Any
    pos: int
    n: int
    first: int  # row in the step's arrays


def cut(row: Row, spans: list[tuple[int, int]]) -> list[Row]:
    return [row._replace(pos=pos, n=n, first=row.first + pos - row.pos) for pos, n in spans]


class Expanded(NamedTuple):
    """What is sent for some rows: items, their parts, and the row in `rows` that each is of."""

    items: list[tuple[ClusterSequence, int, int]]
    parts: list[tuple[int, int]]
    of: list[int]


def layer_spec(pool: ClusterPool, layer: int) -> attnd.LayerSpec:
    layers = pool.spec.layers
    return layers[layer if len(layers) > 1 else 0] if layers else attnd.LayerSpec()


def reaches(layer: attnd.LayerSpec, pos: int, base: int, past: int) -> bool:
    """Whether a query at pos or behind may see a token of [base, past)."""
    window = layer.window_tokens
    return not window or past > pos - window + 1 or base < layer.sink_tokens


def expand(layer: attnd.LayerSpec, rows: list[Row], attends: bool) -> tuple[Expanded, Expanded]:
    """The items that append or see themselves, and those of the parts before them."""
    own, before = Expanded([], [], []), Expanded([], [], [])
    for at, r in enumerate(rows):
        if not isinstance(r.seq, LongSequence):
            own.items.append((r.seq, r.pos, r.n))
            own.parts.append((0, 0))
            own.of.append(at)
            continue
        with r.seq._lock:
            shards, i = list(r.seq.shards), r.seq.index_of(r.pos)
        own.items.append((shards[i], r.pos - shards[i].base, r.n))
        own.parts.append((shards[i].base, 0))
        own.of.append(at)
        for shard, following in zip(shards[:i], shards[1:]):
            if attends and reaches(layer, r.pos, shard.base, following.base):
                before.items.append((shard, r.pos - shard.base, r.n))
                before.parts.append((shard.base, following.base - shard.base))
                before.of.append(at)
    return own, before


def taken(rows: list[Row], of: list[int], array: Any) -> Any:
    """The rows of an array, one item behind another."""
    if array is None:
        return None
    if len(of) == 1:
        return array[rows[of[0]].first : rows[of[0]].first + rows[of[0]].n]
    return np.concatenate([array[rows[at].first : rows[at].first + rows[at].n] for at in of])


def merging(kind: int, outs: Any, lses: Any, out: Any, lse: Any) -> Callable[[], None]:
    """What merges outs [parts, n, heads, dim] and lses [parts, n, heads], over some keys each, to out
    [n, heads, dim] and lse [n, heads], or None, over all. kind: of outs and out."""
    parts, n, heads, dim = outs.shape
    at = [
        0 if x is None else address_of(x, name, dtype, shape, is_output)[0]
        for x, name, dtype, shape, is_output in (
            (outs, "outs", kind, outs.shape, False),
            (lses, "lses", F32, outs.shape[:3], False),
            (out, "out", kind, outs.shape[1:], True),
            (lse, "lse", F32, outs.shape[1:3], True),
        )
    ]
    attn_merge = library().attn_merge
    return lambda: check(attn_merge(kind, parts, n * heads, dim, *at))


def nan_of(x: np.ndarray) -> Any:
    return 0x7FC0 if x.dtype == np.uint16 else np.nan


def run_long(
    pool: ClusterPool,
    layer: int,
    items: ClusterItems,
    arrays: _Arrays,
    timeout: float | None,
    statuses: list[int],
    totals: list[int],
) -> attnd.AttndError | None:
    """As _run(), of items some of whose sequences have shards."""
    given = [arrays.rows[name] for name in ("q", "k", "v")] + [arrays.out, arrays.lse]
    if any(x is not None and not isinstance(x, np.ndarray) for x in given):
        raise TypeError("arrays of a step with a sequence in shards are numpy's")
    appends = arrays.rows["k"] is not None
    left: list[list[Row]] = []  # of each item, its spans
    for i, (seq, pos, n) in enumerate(items.rows):
        seq = seq.seq if isinstance(seq, ShardRange) else seq
        is_long = isinstance(seq, LongSequence)
        spans = seq.spans(layer, pos, n, appends, timeout) if is_long else [(pos, n)]
        left.append(cut(Row(i, seq, pos, n, items.first[i]), spans))
    failed: attnd.AttndError | None = None
    while any(left):
        rows = [spans.pop(0) for spans in left if spans]
        wrong = _run_spans(pool, layer, rows, arrays, timeout, statuses, totals)
        for r in [r for r in rows if statuses[r.item] != 0]:
            if (
                appends
                and statuses[r.item] == attnd.OutOfBlocksError.status
                and isinstance(r.seq, LongSequence)
                and r.seq.is_growing(layer, r.pos)
            ):
                try:
                    r.seq.grow(r.pos, timeout)
                    left[r.item][:0] = cut(r, r.seq.spans(layer, r.pos, r.n, appends, timeout))
                    statuses[r.item] = 0
                    continue
                except attnd.AttndError as e:
                    wrong = e
            failed = failed or wrong
            left[r.item] = []
            for x in (arrays.out, arrays.lse):
                if x is not None:
                    first = items.first[r.item]
                    x[first : first + items.rows[r.item][2]] = nan_of(x)
    return failed


def _run_spans(
    pool: ClusterPool,
    layer: int,
    rows: list[Row],
    arrays: _Arrays,
    timeout: float | None,
    statuses: list[int],
    totals: list[int],
) -> attnd.AttndError | None:
    """Sends each row to all shards that it needs, at once, and merges what they give."""
    own, before = expand(layer_spec(pool, layer), rows, arrays.rows["q"] is not None)

    sent: list[tuple[Expanded, _Arrays, list[int]]] = []
    rounds = []
    for x, is_full in ((own, False), (before, True)):
        if not x.items:
            continue
        mine = ClusterItems(x.items)
        q = taken(rows, x.of, arrays.rows["q"])
        n, h = mine.n_tokens, pool.spec.num_q_heads
        out = lse = None
        if q is not None:
            out = np.empty((n, h, pool.spec.out_row), q.dtype)
            lse = np.empty((n, h), np.float32)
        k, v = (None if is_full else taken(rows, x.of, arrays.rows[name]) for name in ("k", "v"))
        its = [0] * mine.n_items
        part = _Arrays(out, lse, {"q": q, "k": k, "v": v}, {"is_full": is_full}, x.parts)
        sent.append((x, part, its))
        rounds.append(pool._rounds(layer, mine, part, timeout, its, totals, False))
    found: list[list[Any]] = [[] for _ in rows]
    failed: attnd.AttndError | None = None
    for (x, part, its), wrong in zip(sent, together(*rounds)):
        at = 0
        for row, status in zip(x.of, its):
            r = rows[row]
            if status != 0:
                statuses[r.item] = status
                failed = failed or wrong
            elif part.out is not None:
                found[row].append((part.out[at : at + r.n], part.lse[at : at + r.n]))
            at += r.n
    for r, parts in zip(rows, found):
        if not parts or statuses[r.item] != 0:
            continue
        here = slice(r.first, r.first + r.n)
        out, lse = arrays.out[here], None if arrays.lse is None else arrays.lse[here]
        if len(parts) == 1:
            out[...] = parts[0][0]
            if lse is not None:
                lse[...] = parts[0][1]
        else:
            outs, lses = (np.stack(x) for x in zip(*parts))
            merging(pool._dtype, outs, lses, out, lse)()
    return failed
