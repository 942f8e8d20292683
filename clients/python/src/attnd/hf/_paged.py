"""The cache of continuous batching: which request has which sequences, and one pass of packed tokens.

It stands where transformers has a PagedAttentionCache. The schedulers ask it for room and give requests
back; keys and values are the daemon's, so that it has no tensors, no blocks to copy and no indices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._handle import NotPicklable
from ..errors import AttndError, NotFoundError, SequenceGoneError
from ..pool import Sequence
from ._calls import NOT_CAUSAL_ALONE, Mask, Seen, n_queries
from ._handed import Handed, hand, refuse, refuse_attribute
from ._latent import Absorbed
from ._rows import Packed, Row, close_all, fork_rows, open_rows

if TYPE_CHECKING:
    from ._key import Taken
    from ._worker import Worker

# What transformers gives each attention call of continuous batching, for caches of other kinds.
_HARMLESS = frozenset(
    "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k write_index read_index block_table"
    " logits_indices logits_processor_args logits_to_keep position_ids use_cache cache_position"
    " output_hidden_states output_router_logits return_dict past_key_values position_embeddings".split()
)


class _Held:
    """A request's sequences.

    n_shared  tokens that it began with: in blocks that others have, too
    n_blocks  beyond those, of each pool; what the scheduler was promised
    n_sent    of its token ids
    taken     the key under which they are shared; None: they are not
    """

    def __init__(
        self, row: Row | None, n_shared: int = 0, n_sent: int = 0, taken: Taken | None = None
    ):
        self.row = row
        self.taken = taken
        self.n_shared = n_shared
        self.n_blocks = 0
        self.n_sent = n_sent


class _NoSectors:
    """What schedulers ask about the memory of transformers' own cache: nothing there is to be freed."""

    def try_to_free_sectors(self) -> None:
        pass


class PagedCache(NotPicklable):
    """Requests and their sequences, for the schedulers of transformers; one for each manager.

    The room that it promises is this process's own count. Others may have blocks of the same pools: a
    step finds that out.
    """

    def __init__(self, worker: Worker, max_batch_tokens: int, is_sharing: bool):
        self.worker = worker
        self.max_batch_tokens = max_batch_tokens
        self.is_closed = self.is_gone = False
        sharing = worker.sharing if is_sharing else None
        if sharing is not None and not sharing.rope.is_fixed:
            sharing.say(
                "the model's rotary frequencies depend on the longest text of a batch, whose requests"
                " are others each time"
            )
            sharing = None
        self._sharing = sharing
        self._block_tokens = worker.pool.spec.block_tokens
        self._held: dict[str, _Held] = {}
        self._pass: Packed | None = None
        self._index: torch.Tensor | None = None  # tokens of the batch that are computed; None: all
        self._n_layers = 0  # of the pass, so far
        worker._caches.add(self)

        # as transformers names them
        self.use_prefix_sharing = sharing is not None
        self.cache_allocators: dict[str, Any] = {}
        self.pool = _NoSectors()
        self.num_blocks = min(pool.spec.n_blocks for pool in worker.pools.all)
        self.max_tokens_read = self.num_blocks * self._block_tokens
        self.max_blocks_per_request = self.max_decode_fast_path_length = 0  # no block tables
        self.read_cache_limit = None
        self.bytes_per_sector = 1

    def __getattr__(self, name: str) -> Any:
        raise refuse_attribute(f"a cache of continuous batching has no {name}")

    # ---- what the schedulers ask

    def _blocks(self, n_tokens: int) -> int:
        return -(-n_tokens // self._block_tokens)

    def can_ever_hold(self, n_tokens: int) -> bool:
        return self._blocks(n_tokens) <= self.num_blocks

    def can_store_request_tokens(self, state: Any, request_len: int) -> bool:
        held = self._held.get(state.request_id)
        n_shared = 0 if held is None else held.n_shared
        wanted = self._blocks(state.current_len() + request_len) - n_shared // self._block_tokens
        others = sum(h.n_blocks for h in self._held.values() if h is not held)
        if others + wanted > self.num_blocks:
            return False
        if held is None:
            held = self._held[state.request_id] = _Held(None)
        held.n_blocks = max(held.n_blocks, wanted)
        return True

    def compute_free_capacity(self) -> float:
        return 1 - sum(h.n_blocks for h in self._held.values()) / self.num_blocks

    def evict_cached_blocks(self) -> bool:
        return False  # the daemon does when it needs them

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Opens a request's sequences; the tokens that all of them have already."""
        taken = None
        if self._sharing is not None:
            taken = self._sharing.take(is_thorough=not self._held)
        if taken is None:
            return 0
        try:
            row = open_rows(self.worker.pools.all, 1, taken.number, prompt_ids)[0]
        except AttndError:
            return 0  # the request's step will find the same, and knows what to do
        n = min(seq.n_cached for seq in row)
        for seq in row:
            if seq.n_cached > n:
                seq.truncate(n)
                seq.set_tokens(n, prompt_ids[n:])
        self._forget([request_id])
        self._held[request_id] = _Held(row, n, len(prompt_ids), taken)
        return n

    def count_new_complete_blocks(self, state: Any, request_len: int) -> dict[str, int]:
        return {}

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        pass  # tell() has

    def prepare_fork_request(
        self, src_state: Any, dst_req_ids: list[str], copies: Any
    ) -> list[str]:
        """The sequences of one request for others as well; nothing is copied."""
        held = self._held[src_state.request_id]
        assert held.row is not None
        n = src_state.current_len()
        try:
            rows = fork_rows([held.row] * len(dst_req_ids))
        except AttndError:
            return []  # they begin with the prompt instead
        for request_id, row in zip(dst_req_ids, rows):
            self._held[request_id] = _Held(row, n, held.n_sent, held.taken)
        return dst_req_ids

    def perform_cache_copy(self, copies: Any) -> None:
        pass

    def extend_read_and_write_indices(self, *args: Any) -> None:
        pass

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        self._forget([request_id])

    def free_all_requests(self) -> None:
        self._forget(list(self._held))

    def reset(self) -> None:
        self.free_all_requests()

    # ---- sequences

    def _row(self, request_id: str, n_tokens: int) -> Row:
        """The request's, which has so many tokens."""
        held = self._held[request_id]
        if held.row is None:
            held.row = open_rows(self.worker.pools.all, 1)[0]
        if held.taken and self._sharing and not self._sharing.is_still(held.taken):
            held.taken = None  # what comes now has other keys and values
            for seq in held.row:
                seq.truncate(n_tokens)  # forgets the ids of what is not there yet
        return held.row

    def _forget(self, request_ids: list[str]) -> None:
        gone = [held for i in request_ids if (held := self._held.pop(i, None)) is not None]
        close_all(seq for held in gone for seq in held.row or ())

    def forget(self) -> list[Sequence]:
        """Lets go of the sequences, which are the caller's to close."""
        held, self._held = self._held, {}
        return [seq for h in held.values() for seq in h.row or ()]

    def close(self) -> None:
        self.is_closed = True
        self.worker._caches.discard(self)
        close_all(self.forget())

    def tell(self, state: Any) -> None:
        """Says which tokens a request has, once more blocks are full of them."""
        held, n = self._held[state.request_id], state.position_offset
        if held.taken is None:
            return
        if n // self._block_tokens > held.n_sent // self._block_tokens:
            tokens = (state.initial_tokens + state.generated_tokens)[held.n_sent : n]
            try:
                for seq in held.row or ():
                    seq.set_tokens(held.n_sent, tokens)
            except NotFoundError:
                return  # the next step will find the same
            held.n_sent = n

    # ---- a forward pass

    def update(self, keys: Any, values: Any, layer: int, **kw: Any) -> tuple[Handed, Handed]:
        """From transformers 5.24 on, what says which cache the attention call that follows is of."""
        return hand(self, layer, keys, values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return n_queries(query_length), 0  # the mask is of the packed tokens alone

    def begin(self, batch: list[tuple[str, int, int]], left_out: set[str]) -> None:
        """The next pass is of these requests' tokens, one request behind the other: from which position
        on, and how many. The rows of those that are left out are not computed."""
        if self.is_closed:
            raise SequenceGoneError("the tokens of these requests went with the session")
        runs: list[tuple[Row, int, int]] = []
        keep: list[int] = []
        first = 0
        for request_id, pos, n_tokens in batch:
            if request_id not in left_out:
                runs.append((self._row(request_id, pos), pos, n_tokens))
                keep.extend(range(first, first + n_tokens))
                for layer in self.worker.seen:
                    self.worker.check_window(layer, pos + n_tokens)
            first += n_tokens
        self._pass = Packed(runs, self.worker)
        self._index = None
        if len(keep) < first:
            self._index = torch.tensor(keep, device=self.worker.model.device)
        self._n_layers = 0

    @property
    def absorbs_there(self) -> bool:
        return self.worker.absorbs_there

    def is_absorbed(self, module: Any, key: Any, value: Any) -> bool:
        return self.worker.is_absorbed(key.update.layer)

    def attend_packed(
        self,
        module: Any,
        query: torch.Tensor,
        key: Any,
        value: Any,
        mask: Any,
        dropout: float,
        kwargs: dict[str, Any],
        latent: Absorbed | None = None,
    ) -> torch.Tensor:
        """The attention of one layer; shapes as in _calls.py, of a batch of one."""
        worker, layer = self.worker, getattr(module, "layer_idx", None)
        worker.check_attached()
        if layer is None or layer not in worker.seen:
            raise refuse(f"continuous batching, and layer {layer}, which has no keys of its own")
        if not isinstance(mask, Mask) or mask.refusal not in (None, NOT_CAUSAL_ALONE):
            raise refuse(f"continuous batching with a mask of the model's own ({type(mask).__name__})")
        if dropout or not getattr(module, "is_causal", True) or kwargs.pop("is_causal", True) is False:
            raise refuse(f"layer {layer} is not causal, or has dropout {dropout}")
        known = {k: kwargs.pop(k, None) for k in ("scaling", "softcap", "s_aux")}
        kwargs.pop("sliding_window", None)  # the mask has it
        for name, given in kwargs.items():
            if name not in _HARMLESS and given is not None and given is not False:
                raise refuse(f"the argument {name} of layer {layer}'s attention")
        worker.seen[layer].check(layer, Seen(layer, query, key, value, mask, known, latent))
        if self._pass is None or layer != list(worker.seen)[self._n_layers % len(worker.seen)]:
            raise refuse(f"continuous batching, and layer {layer} out of its order")
        self._n_layers += 1
        packed = [x[0].transpose(0, 1) for x in (query, key, value)]
        if self._index is not None:
            packed = [x.index_select(0, self._index) for x in packed]
        out = worker.attend(layer, self._pass, [x.contiguous() for x in packed], value.shape[3])
        if self._index is not None:
            whole = out.new_zeros(query.shape[2], *out.shape[1:])
            out = whole.index_copy_(0, self._index, out)
        return out[None]
