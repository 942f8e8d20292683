"""Prompts that the cache has already: the ids of tokens, told to the daemon as they come, and the part
of a prompt that a forward pass leaves out."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch

from ._rows import Row, close_all

if TYPE_CHECKING:
    from ._cache import Cache

# Arguments that say nothing about what a token's keys and values are.
_PLAIN = frozenset(
    "input_ids attention_mask position_ids cache_position cache past_key_values use_cache logits_to_keep"
    " return_dict output_attentions output_hidden_states".split()
)
_CHUNK = 1 << 24  # elements that are hashed at a time


def _sum_of(tensor: torch.Tensor) -> int:
    """A hash of a tensor's bytes and where they are, made where it is."""
    words = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(words, (0, -words.numel() % 8)).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for first in range(0, words.numel(), _CHUNK):
        part = words[first : first + _CHUNK]
        at = torch.arange(first + 1, first + 1 + part.numel(), device=words.device)
        mixed = (part ^ (at * -0x61C8864680B583EB)) * 0x2545F4914F6CDD1D
        mixed = (mixed ^ (mixed >> 29)) * -0x40A7B892E31B1A47
        total += (mixed ^ (mixed >> 32)).sum()
    return int(total.item())


def weights_digest(model: Any) -> int:
    """64 bits that models have in common only if their keys and values are the same: of the config
    and of every weight as it is now."""
    config = {k: v for k, v in model.config.to_dict().items() if k != "_name_or_path"}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        about = (name, str(tensor.dtype), tuple(tensor.shape), _sum_of(tensor))
        digest.update(repr(about).encode())
    return int.from_bytes(digest.digest()[:8], "little") or 1


class KnownTokens:
    """The tokens of one cache's rows, as far as they are known.

    Ends (is_known) with the first pass whose keys and values are not of its token ids alone.
    """

    def __init__(self, cache: Cache, adapter: int):
        self._cache = cache
        self._adapter = adapter
        self._block_tokens = cache.worker.pool.spec.block_tokens
        text = cache.worker.model.config.get_text_config()
        # queries are scaled by their column, padding included
        self._counts_columns = bool(getattr(text, "attn_temperature_tuning", None))
        self.forget()

    def forget(self) -> None:
        self.is_known = True
        self._ids: list[list[int]] = []  # of each row
        self._n_sent: list[int] = []
        self._noted: list[tuple[torch.Tensor, Any]] = []  # ids and positions, behind those
        self._columns = 0  # of both

    # ---- a forward pass

    def before(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The pass's arguments, without what the cache has of the prompt."""
        ids = kwargs.get("input_ids")
        others = [
            k for k, v in kwargs.items() if k not in _PLAIN and v is not None and v is not False
        ]
        if args or others or not (isinstance(ids, torch.Tensor) and ids.ndim == 2):
            self.is_known = False
            return kwargs
        asks_for_all = kwargs.get("logits_to_keep") != 1 or kwargs.get("output_hidden_states")
        if not self.is_known or self._cache.rows or asks_for_all or ids.shape[1] < 2:
            return kwargs
        pads = _left_pads(ids, kwargs.get("attention_mask"))
        if pads is None or not self._is_plain(kwargs.get("position_ids"), 0, ids.shape[1], pads):
            self.is_known = False
            return kwargs
        skip = self._open(ids.tolist(), pads)
        if skip == 0:
            return kwargs
        kwargs = {**kwargs, "input_ids": ids[:, skip:]}
        for name in ("position_ids", "cache_position"):  # of two dimensions and of one
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][..., skip:]
        return kwargs

    def after(self, kwargs: dict[str, Any]) -> None:
        """The pass has been: its tokens are in the cache."""
        now = self._cache.get_seq_length()
        if not self.is_known or now <= self._columns:
            return
        ids = kwargs["input_ids"]
        if now - ids.shape[1] != self._columns:  # some came otherwise
            self.is_known = False
            return
        blocks = self._blocks_of_longest()
        self._noted.append((ids, kwargs.get("position_ids")))
        self._columns = now
        if self._blocks_of_longest() > blocks:
            self._tell()

    # ---- rows

    def select(self, rows: list[int]) -> None:
        self._take()
        if self._ids:
            self._ids = [list(self._ids[row]) for row in rows]
            self._n_sent = [self._n_sent[row] for row in rows]

    def crop(self, keep: int) -> None:
        """Before the rows are truncated to so many columns."""
        self._take()
        if not self.is_known or keep >= self._columns:
            return
        self._columns = keep
        for i, pad in enumerate(self._cache.pads[: len(self._ids)]):
            del self._ids[i][max(keep - pad, 0) :]
            self._n_sent[i] = min(self._n_sent[i], len(self._ids[i]))

    def copy_to(self, other: KnownTokens) -> None:
        self._take()
        other.is_known, other._columns = self.is_known, self._columns
        other._ids, other._n_sent = [list(ids) for ids in self._ids], list(self._n_sent)

    def _take(self) -> None:
        """What was noted, as numbers: waits for the device."""
        column = self._columns - sum(ids.shape[1] for ids, _ in self._noted)
        pads = self._cache.pads
        for ids, positions in self._noted:
            if not self._is_plain(positions, column, ids.shape[1], pads):
                self.is_known = False
                break
            if not self._ids:
                self._ids, self._n_sent = [[] for _ in pads], [0] * len(pads)
            for known, row, pad in zip(self._ids, ids.tolist(), pads):
                known.extend(row[max(pad - column, 0) :])
            column += ids.shape[1]
        self._noted = []

    def _is_plain(self, positions: Any, column: int, n: int, pads: list[int]) -> bool:
        """Whether n columns' tokens are what they would be without the padding of their rows."""
        return not (self._counts_columns and any(pads)) and _are_plain(positions, column, n, pads)

    def _blocks_of_longest(self) -> int:
        pads = self._cache.pads
        return (self._columns - min(pads)) // self._block_tokens if pads else 0

    def _tell(self) -> None:
        self._take()
        for i, (row, ids) in enumerate(zip(self._cache.rows, self._ids)):
            n_sent = self._n_sent[i]
            if self.is_known and len(ids) // self._block_tokens > n_sent // self._block_tokens:
                for seq in row:
                    seq.set_tokens(n_sent, ids[n_sent:])
                self._n_sent[i] = len(ids)

    def _open(self, ids: list[list[int]], pads: list[int]) -> int:
        """The cache's rows, with what there is of these tokens; the columns that all have."""
        cache = self._cache
        self._ids = [row[pad:] for row, pad in zip(ids, pads)]
        rows: list[Row] = []
        opened = []
        try:
            for tokens in self._ids:
                for pool in cache.worker.pools.all:
                    opened.append(pool.open(tokens=tokens, adapter=self._adapter))
                rows.append(tuple(opened[-len(cache.worker.pools.all) :]))
            skip = min(pad + seq.n_cached for row, pad in zip(rows, pads) for seq in row)
            if skip <= max(pads):  # a row of padding alone
                skip = 0
            for row, pad, tokens in zip(rows, pads, self._ids):
                for seq in row:
                    keep = max(skip - pad, 0)
                    if seq.n_cached > keep:
                        seq.truncate(keep)
                        seq.set_tokens(keep, tokens[keep:])
        except BaseException:
            close_all(opened)
            raise
        self._n_sent = [len(tokens) for tokens in self._ids]
        self._columns = len(ids[0])
        cache.begin_at(rows, pads, skip)
        return skip


def _left_pads(ids: torch.Tensor, mask: Any) -> list[int] | None:
    """Columns before each row's first token; None: not of left padding alone, or a row without any."""
    if mask is None:
        return [0] * ids.shape[0]
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        return None
    pads: list[int] = (mask.shape[1] - mask.bool().sum(dim=1)).tolist()
    columns = torch.arange(mask.shape[1], device=mask.device)
    first = torch.tensor(pads, device=mask.device)[:, None]
    is_left = bool(torch.equal(mask.bool(), columns[None, :] >= first))
    return pads if is_left and max(pads) < mask.shape[1] else None


def _are_plain(positions: Any, column: int, n: int, pads: list[int]) -> bool:
    """Whether the tokens of n columns are at the positions that they have without their padding."""
    if positions is None:
        return not any(pads)
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or positions.shape[1] != n:
        return False
    rows = (
        positions.expand(len(pads), n).tolist() if positions.shape[0] == 1 else positions.tolist()
    )
    return len(rows) == len(pads) and all(
        row[max(pad - column, 0) :] == list(range(max(column - pad, 0), max(column + n - pad, 0)))
        for row, pad in zip(rows, pads)
    )
