"""SGLang's prefix cache over attnd: what attnd has of a prompt counts as computed.

SGLang is told of a hit as of one in host memory: when it admits the request, it gives slots to the
tokens that were found, as to those that it computes, and the sequence is opened with them. So its
count of slots covers all that running requests have in attnd, and blocks that several of them share
are counted once for each.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefResult,
    EvictResult,
    IncLockRefResult,
    MatchResult,
)

import attnd

from .live import shared

logger = logging.getLogger(__name__)


def adapter_of(req: Any, flushes: str) -> int | None:
    """A number for what a request's K and V depend on besides tokens and model; 0: nothing.

    None: they depend on what has no number (images, embeddings), and must not be shared.
    """
    for field in "multimodal_inputs", "input_embeds", "positional_embed_overrides", "lora_id":
        if getattr(req, field, None) is not None:
            return None
    parts = [getattr(req, "extra_key", None), getattr(req, "cache_salt", None), flushes]
    if not any(parts):
        return 0
    h = hashlib.sha256(repr(parts).encode())
    return int.from_bytes(h.digest()[:8], "little") or 1


class AttndCache(BasePrefixCache):
    def __init__(self, context: Any):
        params = context.params
        if shared.live is None:
            raise ValueError("attnd-sglang: --radix-cache-backend attnd needs --attention-backend attnd")
        self.live = shared.live
        self.disable = False
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.sliding_window_size = None
        self.root_node = self
        self._flushes = ""
        self._slots: dict[str, torch.Tensor] = {}  # of the tokens found, until they are in the row
        if params.enable_metrics:
            self.init_metrics_collector()

    def reset(self) -> None:
        """Nothing that was cached before is found again: not by this engine."""
        self._flushes = secrets.token_hex(8)

    # ---- admission

    def match_prefix(self, params: Any) -> MatchResult:
        req, n = params.req, 0
        if req is not None:
            adapter = adapter_of(req, self._flushes)
            self.live.matched(req.rid, adapter)
            if adapter is not None and len(params.key) >= self.page_size:
                n = self._n_cached(params.key.raw_token_ids(), adapter)
        return MatchResult(
            device_prefix_len=0,
            last_device_node=self,
            last_host_node=self,
            best_match_node=self,
            host_hit_length=n,
            cache_protected_len=0,
        )

    def _n_cached(self, tokens: Any, adapter: int) -> int:
        """Of tokens, all of which may be found; an open leaves one to be computed."""
        try:
            n = self.live.n_cached([*tokens, 0], adapter)
        except attnd.AttndError as e:  # nothing depends on a probe
            logger.warning("attnd: a prompt is computed whole: %s", e)
            return 0
        return n // self.page_size * self.page_size

    def init_load_back(self, params: Any) -> tuple[int, Any]:
        req, n = params.req, params.host_hit_length
        slots = self.token_to_kv_pool_allocator.alloc(n)
        if slots is None:
            return 0, self
        ids = (req.origin_input_ids + req.output_ids)[: n + 1]
        if not self.live.open_with(req.rid, ids, n):
            self.token_to_kv_pool_allocator.free(slots)
            return 0, self
        self._slots[req.rid] = slots
        shared.reqs[req.rid] = req
        return n, self

    def load_back_is_cache_owned(self) -> bool:
        return False  # the slots are the request's, and go with it

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        return self._slots.pop(req.rid)

    def ready_to_load_host_cache(self) -> int:
        return -1  # there is nothing to wait for

    def check_hicache_events(self) -> None:
        pass

    # ---- a request's life

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Its first up_to tokens are computed: their ids follow."""
        if not req.finished():
            shared.reqs[req.rid] = req
        self.live.tell(req.rid, req.full_untruncated_fill_ids[:up_to])

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """It has finished, was aborted, or was retracted: then it goes on with what it had."""
        if not checkpointed and not req.skip_radix_cache_insert:
            self.live.tell(req.rid, req.origin_input_ids + req.output_ids)
        shared.reqs.pop(req.rid, None)
        self._slots.pop(req.rid, None)
        self.live.end(req.rid)

    def release_aborted_request(self, handle: Any) -> None:
        self.live.forget(handle.rid)

    def release_host_resources(self) -> None:
        self.live.close()

    # ---- attnd evicts by itself, and what runs is never evicted

    def evict(self, params: Any) -> EvictResult:
        return EvictResult()

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        return IncLockRefResult(delta=0)

    def dec_lock_ref(self, node: Any, params: Any = None) -> DecLockRefResult:
        return DecLockRefResult(delta=0)

    def total_size(self) -> int:
        return 0

    def pretty_print(self) -> None:
        print(f"prefixes are in attnd, pool {self.live.requests.pool.spec.name}")
