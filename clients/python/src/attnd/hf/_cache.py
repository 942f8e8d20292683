"""The KV cache of one batch: rows and sequences, padding, and one layer of one forward pass."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache as _TransformersCache

from .._handle import Closing, NotPicklable
from ..errors import InvalidArgumentError, SequenceGoneError
from ..pool import Sequence
from ._calls import Mask, Seen, n_queries
from ._handed import Update, hand, refuse, refuse_attribute
from ._indexed import IndexerKeys, positions
from ._prefix import KnownTokens
from ._rows import Plan, Row, close_all, fork_rows, open_rows
from ._saved import Saved
from ._states import States

if TYPE_CHECKING:
    from ._worker import Worker


class _Layer:
    """Stands for a layer whose keys and values are in the daemon."""

    def __init__(self, cache: Cache, layer: int):
        # holds nothing itself
        sliding = cache.is_sliding[layer]
        self.__dict__.update(_layer=layer, is_sliding=sliding, is_initialized=False)

    def __getattr__(self, name: str) -> Any:
        raise refuse_attribute(
            f"{name} of layer {self._layer}: its keys and values are in the daemon"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise refuse(f"{name} of layer {self._layer} set: its keys and values are in the daemon")


_CROSS_ATTENTION = ("is_updated", "self_attention_cache", "cross_attention_cache")


class Cache(Closing, _TransformersCache, NotPicklable):
    """The KV cache of one batch, in the daemon; row i of the batch is `rows[i]`, a sequence of each pool.

    Made by Worker.cache(), given to the model as past_key_values (transformers 5.24: cache). Left padding
    is not stored: row i has pads[i] columns before its first token. close() forgets the sequences.
    """

    def __init__(self, worker: Worker):
        self.states = States(worker.config)
        _TransformersCache.__init__(self, layers=self.states.layers)  # MiniMax's is another besides
        self.worker = worker
        self.is_closed = False
        self.is_gone = False  # closed by Worker.reopen()
        self.rows: list[Row] = []
        self.pads: list[int] = []
        self._columns = dict.fromkeys(worker.seen, 0)  # tokens and padding, by layer
        self._plan: Plan | None = None
        self._has_mask = False
        self.is_draft = False  # of an assistant, whose text is only guesses
        self.n_prompt = 0  # columns of a prompt that comes in chunks
        self._is_recorded = False
        self._saved: Saved | None = None
        self._indexer_keys = IndexerKeys()
        self.known_tokens = None if worker.sharing is None else KnownTokens(self, worker.sharing)

    # ---- what transformers asks

    def __len__(self) -> int:
        return len(self.states.layers) or len(self._columns)

    @property
    def layers(self) -> list[Any]:
        """Those with states of their own; of the others, something that refuses to be edited."""
        return [self.states.of(i) or _Layer(self, i) for i in range(len(self))]

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        """What a base class sets: see states."""

    @property
    def is_sliding(self) -> list[bool]:
        seen = self.worker.seen
        return [i in seen and bool(seen[i].window or seen[i].chunk) for i in range(len(self))]

    def __repr__(self) -> str:
        return f"<attnd.hf.Cache {len(self.rows)} rows, {self.get_seq_length()} columns>"

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kw: Any
    ) -> Any:
        """Hands the new keys and values on; the attention call that follows stores them."""
        self._check_open()
        return hand(self, layer_idx, key_states, value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """All keys of the layer's indexer, whose queries then visit what it chooses."""
        self._check_open()
        column = self._columns[layer_idx]
        end = column + indexer_key_states.shape[1]
        if layer_idx != self.worker.first_layer and end != self.get_seq_length():
            raise refuse(
                f"layer {layer_idx} goes on at column {column}, other layers are at"
                f" {self.get_seq_length()}: crop() the cache after a pass that failed"
            )
        return self._indexer_keys.update(layer_idx, indexer_key_states, column)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the layer; of the first that attends, if this one does not."""
        return self._columns.get(layer_idx, self._columns[self.worker.first_layer])

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + n_queries(query_length), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def max_cache_len(self) -> int:  # of static caches; transformers 5.0 has it in all
        raise refuse_attribute("a cache over attnd has no max_cache_len")

    @property
    def batch_size(self) -> int:
        return len(self.rows) or -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_linear(self) -> list[bool]:
        """Of each layer, whether it keeps states alone. Where none attends, generate() gives all tokens
        of its prompt to a pass, also those that a cache has."""
        return list(super().is_linear) if self.states.layers else [False] * len(self)

    @property
    def is_croppable(self) -> bool:
        return not self.states.layers

    @property
    def is_initialized(self) -> bool:
        return True

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row beam_idx[i] was: the first use keeps the sequence, others fork it."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        rows = torch.arange(len(self.rows))[indices.cpu()]  # indices may be a bool mask
        self._select(rows.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self.rows)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove columns; a positive number is the columns to keep."""
        if self.states.layers:
            raise refuse("crop of a model with recurrent or convolution states")
        self.worker.layers.wait()
        now = max(self._columns.values())
        keep = tokens_to_remove if tokens_to_remove > 0 else now + tokens_to_remove
        if keep >= now:
            return
        keep = max(keep, 0)
        if self.known_tokens is not None:
            self.known_tokens.crop(keep)
        try:
            self._truncate(keep)
        except InvalidArgumentError:  # beyond a window, where nothing is left
            if self.is_draft:
                self.reset()  # generate() gives an assistant all tokens that its cache lacks
                return
            saved = None if self._saved is None else self._saved.take(keep)
            if saved is None:
                raise
            close_all(self.sequences)
            self.rows = saved[1]
            self._columns = dict.fromkeys(self._columns, saved[0])
            if self.known_tokens is not None:
                self.known_tokens.is_known = False
            self._truncate(keep)
        if self._saved is not None:
            self._saved.forget()
        self._columns = {layer: min(n, keep) for layer, n in self._columns.items()}
        self._plan = None

    def activate_past_recording(self) -> None:
        """From now on, crop() goes back to any column that the cache had, at most to the last crop()."""
        if self.states.layers:
            raise refuse("activate_past_recording of a model with recurrent or convolution states")
        self._saved = self._saved or Saved(self)

    def _truncate(self, keep: int) -> None:
        # layers may differ: an early exit leaves the last ones behind
        longest = self.worker.pools.longest(self._columns)
        for row, pad in zip(self.rows, self.pads):
            for seq, n_columns in zip(row, longest):
                if n_columns > max(keep, pad):
                    seq.truncate(max(keep - pad, 0))

    def reset(self) -> None:
        """Closes the sequences; the cache is as new."""
        close_all(self.forget())

    def forget(self) -> list[Sequence]:
        """Lets go of the sequences, which are the caller's to close."""
        self.worker.layers.wait()
        if self._saved is not None and not self.is_gone:
            self._saved.forget()
        self._saved = None
        sequences = self.sequences
        self.rows, self.pads = [], []
        self._columns = dict.fromkeys(self._columns, 0)
        self._plan, self._has_mask = None, False
        self.states = States(self.worker.config)
        self._indexer_keys = IndexerKeys()
        if self.known_tokens is not None:
            self.known_tokens.forget()
        return sequences

    def close(self) -> None:
        """Forgets the sequences. The cache cannot be used any more."""
        self.is_closed = True
        self.worker._caches.discard(self)
        self.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        """A cache of its own with the same tokens: the sequences are forked, nothing is copied."""
        if self.is_closed:
            raise refuse("a copy of a closed cache")
        self.worker.layers.wait()
        rows = fork_rows(self.rows)
        other = self.worker.cache()
        other.rows, other.pads = rows, list(self.pads)
        other._columns = dict(self._columns)
        other.states = copy.deepcopy(self.states, memo)
        other._indexer_keys = self._indexer_keys.copy()
        other._has_mask = self._has_mask
        if self.known_tokens is not None and other.known_tokens is not None:
            self.known_tokens.copy_to(other.known_tokens)
        return other

    def __getattr__(self, name: str) -> Any:
        if name in _CROSS_ATTENTION:
            raise refuse_attribute(f"cross attention (the model asks the cache for {name})")
        raise refuse_attribute(f"a cache over attnd has no {name}")

    def _check_open(self) -> None:
        self.worker.check_attached()
        if self.is_gone:
            raise SequenceGoneError(
                "the tokens of this cache went with the session: begin a new one"
            )
        if self.is_closed:
            raise refuse("this cache is closed")

    # ---- rows

    @property
    def sequences(self) -> list[Sequence]:
        """Of all rows, one after the other."""
        return [seq for row in self.rows for seq in row]

    def _select(self, rows: list[int]) -> None:
        self.worker.layers.wait()
        if self._saved is not None:
            self._saved.forget()
        if self.known_tokens is not None:
            self.known_tokens.select(rows)
        old = self.rows
        again = [i for i, row in enumerate(rows) if row in rows[:i]]
        new = [old[row] for row in rows]
        for i, fork in zip(again, fork_rows(new[i] for i in again)):
            new[i] = fork
        self.rows, self.pads = new, [self.pads[row] for row in rows]
        self.states.select(rows)
        self._indexer_keys.select(rows)
        self._plan = None
        left = set(range(len(old))) - set(rows)
        close_all(seq for i in left for seq in old[i])

    def begin_at(self, rows: list[Row], pads: list[int], column: int) -> None:
        """An empty cache has these rows, of so many columns."""
        self.rows, self.pads = rows, pads
        self._columns = dict.fromkeys(self._columns, column)

    def _open_rows(self, n: int) -> list[Row]:
        adapter = 0 if self.known_tokens is None else self.known_tokens.adapter
        return open_rows(self.worker.pools.all, n, adapter)

    def _check_padding(self, mask: Mask, batch_size: int) -> None:
        """Finds the left padding in the first mask, and that later ones agree with it."""
        pads = [0] * batch_size
        if mask.padding is not None:
            self._has_mask = True
            if mask.padding.shape[0] != batch_size:
                raise refuse(
                    f"attention_mask has {mask.padding.shape[0]} rows, expected those of a batch of"
                    f" {batch_size}"
                )
            seen = mask.padding[:, : mask.kv_length]
            if seen.shape[1] < mask.kv_length:
                raise refuse(
                    f"attention_mask has {seen.shape[1]} columns, expected {mask.kv_length}"
                )
            # as many tokens as there are columns from the first token on: no holes
            n_tokens = seen.sum(dim=1)
            first = torch.where(n_tokens > 0, seen.int().argmax(dim=1), mask.kv_length)
            pads, counts = torch.stack([first, n_tokens]).tolist()
            for row, (pad, count) in enumerate(zip(pads, counts)):
                # in an assistant's text, generate() takes each padding token for padding
                if pad + count != mask.kv_length and not self.is_draft:
                    raise refuse(f"row {row}: padding after a token (pad on the left)")
        elif self.is_draft and self.rows:
            pads = self.pads
        elif self._has_mask:
            raise refuse("attention_mask was given before and is missing now")
        if not self.rows:
            self.rows, self.pads = self._open_rows(batch_size), pads
            return
        if len(self.rows) != batch_size:
            raise refuse(f"a batch of {batch_size} rows on a cache of {len(self.rows)}")
        before = mask.q_offset
        for row, (old, new) in enumerate(zip(self.pads, pads)):
            # a row that was all padding so far may go on with padding
            if old != new and not (self._has_mask and old >= before and new >= before):
                raise refuse(f"row {row} has {new} columns of padding, had {old}")
            if 0 < before == new and mask.q_length == 1 and mask.kv_length > self.n_prompt:
                raise refuse(
                    f"row {row} is all padding and a single token follows: what the model says after"
                    " padding is no text"
                )
        self.pads = pads

    # ---- passes of captured steps

    @property
    def is_even(self) -> bool:
        """Whether all layers have the same columns, and each row a token among them."""
        columns = set(self._columns.values())
        return len(columns) == 1 and max(self.pads, default=0) < columns.pop()

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """A pass leaves the cache as it was: its layers are captured, not run."""
        before = dict(self._columns)
        self._is_recorded = True
        try:
            yield
        finally:
            self._is_recorded = False
            self._columns, self._plan = before, None

    def plan_token(self, padding: Any, device: torch.device) -> Plan:
        """A pass of one more token per row, none of whose layers will call for attention."""
        self._check_open()
        column = self.get_seq_length()
        if padding is not None:
            padding = padding.bool()
        self._check_padding(Mask(0, column, 1, column + 1, padding, None), len(self.rows))
        for layer in self._columns:
            self.worker.check_window(layer, column + 1)
        return Plan(self, column, 1, device)

    def has_passed(self, plan: Plan) -> None:
        self._columns = dict.fromkeys(self._columns, plan.column + 1)
        self._plan = plan

    # ---- one layer of one forward pass

    @property
    def absorbs_there(self) -> bool:
        return self.worker.absorbs_there

    def is_absorbed(self, module: Any, key: Any, value: Any) -> bool:
        return self.worker.is_absorbed(key.update.layer)

    def attend(
        self,
        update: Update,
        seen: Seen,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Mask,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        worker, layer = self.worker, update.layer
        worker.seen[layer].check(layer, seen)
        batch, heads, n_new, _ = query.shape
        is_again = update.is_stored  # of a layer that shares the keys and values of this one
        column = self._columns[layer] - (n_new if is_again else 0)
        if (mask.q_offset, mask.q_length, mask.kv_length) != (column, n_new, column + n_new):
            raise refuse(
                f"layer {layer}: a mask of queries {mask.q_offset}+{mask.q_length}, keys"
                f" {mask.kv_length}; the cache has {column} columns and {n_new} are new"
            )
        worker.check_window(layer, column + n_new)
        plan = self._plan
        is_other = plan is None or (plan.column, plan.n_new) != (column, n_new)
        if is_other or (layer == worker.first_layer and not is_again):
            if not is_again and not self._is_recorded:
                self._check_padding(mask, batch)
                if self._saved is not None:
                    self._saved.before(column, n_new)
            plan = self._plan = Plan(self, column, n_new, query.device)
        assert plan is not None
        given = (query,) if is_again else (query, key, value)
        if n_new == 1:
            packed = [x.squeeze(2) for x in given]
        else:
            packed = [x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in given]
        if indices is not None:
            indices = positions(indices, column, self.pads).flatten(0, 1)
        if plan.index is not None:
            packed = [x.index_select(0, plan.index) for x in packed]
            indices = None if indices is None else indices.index_select(0, plan.index)
        out = worker.attend(layer, plan, packed, value.shape[3], indices)
        update.is_stored = True
        self._columns[layer] = column + n_new
        if plan.index is not None:
            padded = out.new_zeros(batch * n_new, heads, out.shape[2])
            out = padded.index_copy_(0, plan.index, out)
        return out.view(batch, n_new, heads, out.shape[2])
