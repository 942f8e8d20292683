"""Prompts that the cache has already: the ids of tokens, told to the daemon as they come, and the part
of a prompt that a forward pass leaves out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedError
from ._key import ModelKey, Taken
from ._known import refuse_sharing
from ._rope import Rope
from ._rows import Row, close_all

if TYPE_CHECKING:
    from ._cache import Cache

# Arguments that say nothing about what a token's keys and values are.
_PLAIN = frozenset(
    "input_ids attention_mask position_ids cache_position cache past_key_values use_cache logits_to_keep"
    " return_dict output_attentions output_hidden_states".split()
)
_OF_ROPE = 0x9E3779B97F4A7C15  # times the state of the rotary frequencies: its part of a key
_log = logging.getLogger("attnd.hf")


class Sharing:
    """What decides which prefixes a worker shares: the model as it is, and how long a pass's text is."""

    def __init__(self, model: Any):
        self._key = ModelKey(model)
        self.base = self._key.base
        self.rope = Rope(self.base)
        self._said: set[str] = set()
        self._begun = self._key.take()

    def check(self) -> None:
        """After a pass."""
        if not self._key.is_still(self._begun):
            raise refuse_sharing("a forward pass changes the model: it has states of its own")

    def take(self, is_thorough: bool = True) -> Taken | None:
        """The key; None: what is computed now is not shared."""
        try:
            return self._key.take(is_thorough)
        except UnsupportedError as e:
            self.say(e.message)
            return None

    def is_still(self, taken: Taken) -> bool:
        return self._key.is_still(taken)

    def say(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            _log.warning("a prompt is not shared: %s", why)


class KnownTokens:
    """The tokens of one cache's rows, as far as they are known.

    Ends (is_known) with the first pass whose keys and values are not of its token ids alone.
    """

    def __init__(self, cache: Cache, sharing: Sharing):
        self._cache = cache
        self._sharing = sharing
        self.base = sharing.base
        self._block_tokens = cache.worker.pool.spec.block_tokens
        text = cache.worker.model.config.get_text_config()
        # queries are scaled by their column, padding included
        self._counts_columns = bool(getattr(text, "attn_temperature_tuning", None))
        self.forget()

    @property
    def adapter(self) -> int:
        """Under which the rows are opened."""
        if not self.is_known or self._taken is None:
            return 0
        return (self._taken.number + self._rope * _OF_ROPE) % 2**64

    def forget(self) -> None:
        self.is_known = True
        self._taken: Taken | None = None  # with the first pass
        self._rope = 0
        self._ids: list[list[int]] = []  # of each row
        self._n_sent: list[int] = []
        self._noted: list[tuple[torch.Tensor, Any]] = []  # ids and positions, behind those
        self._columns = 0  # of both
        self._is_ahead = False  # ids were told of what a pass is to bring

    # ---- a forward pass

    def before(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The pass's arguments, without what the cache has of the prompt."""
        ids = kwargs.get("input_ids")
        others = [k for k, v in kwargs.items() if k not in _PLAIN and not _is_nothing(v)]
        if self._is_ahead:
            self._untell()
        if args or others or not (isinstance(ids, torch.Tensor) and ids.ndim == 2):
            self.is_known = False
            return kwargs
        if not self.is_known or self._cache.rows:
            return kwargs
        pads = _left_pads(ids, kwargs.get("attention_mask"))
        if pads is None or not self._is_plain(kwargs.get("position_ids"), 0, ids.shape[1], pads):
            self.is_known = False
            return kwargs
        self._take_key(ids.shape[1] - min(pads))
        asks_for_all = kwargs.get("logits_to_keep") != 1 or kwargs.get("output_hidden_states")
        if not self.is_known or asks_for_all or ids.shape[1] < 2 or max(pads) == ids.shape[1]:
            return kwargs
        skip = self._open(ids.tolist(), pads)
        if skip == 0:
            return kwargs
        kwargs = {**kwargs, "input_ids": ids[:, skip:]}
        for name in ("position_ids", "cache_position"):  # of two dimensions and of one
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][..., skip:]
        return kwargs

    def _take_key(self, n_tokens: int) -> None:
        """For the first pass, whose longest row has so many tokens."""
        self._taken, rope = self._sharing.take(), self._sharing.rope.state(n_tokens)
        if rope is None:
            self._sharing.say(
                f"it has {n_tokens} tokens, and from {self._sharing.rope.n_scaled} on the model's rotary"
                " frequencies depend on what it has read before"
            )
        self.is_known = self._taken is not None and rope is not None
        self._rope = rope or 0

    def _is_as_begun(self) -> bool:
        """Whether the pass that has been was computed as the first one was."""
        if self._taken is None or not self._sharing.is_still(self._taken):
            return False
        n_tokens = self._cache.get_seq_length() - min(self._cache.pads, default=0)
        rope = self._sharing.rope.state(n_tokens)
        return rope is not None and rope == self._rope

    def after(self, kwargs: dict[str, Any]) -> None:
        """The pass has been: its tokens are in the cache."""
        self._is_ahead = False
        now = self._cache.get_seq_length()
        if not self.is_known or now <= self._columns:
            return
        ids = kwargs["input_ids"]
        if now - ids.shape[1] != self._columns or not self._is_as_begun():  # some came otherwise
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
        other._taken, other._rope = self._taken, self._rope
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

    def _untell(self) -> None:
        """A pass failed; what comes in its place may be other tokens."""
        self.is_known = self._is_ahead = False
        cache = self._cache
        longest = cache.worker.pools.longest(cache._columns)
        for row, pad in zip(cache.rows, cache.pads):
            for seq, n_columns in zip(row, longest):
                seq.truncate(max(n_columns - pad, 0))

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
                    opened.append(pool.open(tokens=tokens, adapter=self.adapter))
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
        self._is_ahead = True
        cache.begin_at(rows, pads, skip)
        return skip


def _is_nothing(value: Any) -> bool:
    """Of an argument: what a model is given for images that there are none of, too."""
    if isinstance(value, dict):
        return all(x is None for x in value.values())
    return value is None or value is False


def _left_pads(ids: torch.Tensor, mask: Any) -> list[int] | None:
    """Columns before each row's first token; None: not of left padding alone."""
    if mask is None:
        return [0] * ids.shape[0]
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        return None
    pads: list[int] = (mask.shape[1] - mask.bool().sum(dim=1)).tolist()
    columns = torch.arange(mask.shape[1], device=mask.device)
    first = torch.tensor(pads, device=mask.device)[:, None]
    is_left = bool(torch.equal(mask.bool(), columns[None, :] >= first))
    return pads if is_left else None


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
