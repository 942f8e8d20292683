"""The scheduler's side: what attnd has of a prompt counts as computed.

The scheduler only probes, and takes over what another engine has left of a request that has a name.
What a request begins with, and the ids of what it has computed, go to the worker with the step's
metadata, which opens, tells and closes in one message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import attnd
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from vllm.logger import init_logger

from attnd.serving.requests import Opened, Told

from . import identity
from .worker import connect, shared

logger = init_logger(__name__)


@dataclass
class AttndMeta(KVConnectorMetadata):
    opened: list[Opened] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)


@dataclass
class AttndHandshake(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler once."""

    pool: str


class Seen:
    """A request that was scheduled: what its blocks depend on, and the tokens whose ids were told.

    number      of its sequence, whose ids are told at once; None: any
    n_computed  tokens that all ranks were known to have when it was scheduled last
    """

    def __init__(self, request: Any, adapter: int | None, n_told: int, number: int | None):
        self.request, self.adapter, self.n_told, self.number = request, adapter, n_told, number
        self.n_computed = 0

    def is_prompt_told(self, block_tokens: int) -> bool:
        """All its full blocks."""
        return self.n_told + block_tokens > self.request.num_prompt_tokens


class AttndConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.block_tokens = vllm_config.cache_config.block_size
        self._names: list[str] = []  # of the ranks' pools
        self._pools: list[attnd.Pool] = []
        self.seen: dict[str, Seen] = {}
        self.meta = AttndMeta()
        self._n_steps = 0
        self._over: dict[str, attnd.Sequence] = {}  # taken over, of requests that are not scheduled yet
        # Only where ids are known before their tokens are computed, and none is taken back
        self._has_names = not (
            vllm_config.scheduler_config.async_scheduling
            or vllm_config.speculative_config
            or vllm_config.parallel_config.tensor_parallel_size > 1
        )
        self._said: set[str] = set()  # warnings, each once

    # ---- the scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._names = [metadata[rank].pool for rank in sorted(metadata)]

    def _probed(self) -> list[attnd.Pool]:
        """The workers' pools; none: they have not made them (again) yet."""
        if self._pools or not self._names:
            return self._pools
        n, clients, pools = len(self._names), [], []
        try:
            for rank, name in enumerate(self._names):
                clients.append(connect("vllm-scheduler", rank, n))
                pools.append(clients[-1].pool(name))
            self._pools = pools
        except attnd.NotFoundError:
            for client in clients:
                client.close()
        return self._pools

    def _drop_pools(self) -> None:
        for pool in self._pools:
            pool.client.close()
        self._pools = []
        self._over.clear()

    def _warn(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("attnd: %s", what)

    def _adapter(self, request: Any) -> int | None:
        """None: the request must not share."""
        try:
            return identity.adapter_of(request)
        except identity.Unknown as e:
            self._warn(f"a request does not share its prefix: {e}")
            return None

    def _number(self, request: Any, adapter: int | None) -> int | None:
        """The number that a named request's sequence has in every engine of the pool."""
        name = (getattr(request, "kv_transfer_params", None) or {}).get("attnd_request")
        if name is None or adapter is None or not self._names:
            return None
        if not self._has_names:
            self._warn(
                "attnd_request is ignored: speculation, asynchronous scheduling or tensor parallelism"
                " is on"
            )
            return None
        if not isinstance(name, str) or not name:
            self._warn(f"attnd_request is {name!r}, not a name")
            return None
        text = f"{self._names[0]}\0{adapter}\0{name}"
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        if any(s.number == number for s in self.seen.values()) or any(
            seq.id == number for r, seq in self._over.items() if r != request.request_id
        ):
            self._warn("several running requests have the same attnd_request: one of them has the name")
            return None
        return number

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if num_computed_tokens != 0:
            raise RuntimeError("attnd-vllm: vLLM's own prefix cache is on")
        if getattr(request, "skip_reading_prefix_cache", False):  # as where prompt_logprobs are wanted
            return 0, False
        adapter, pools = self._adapter(request), self._probed()
        if adapter is None or not pools:
            return 0, False
        ids = request.all_token_ids
        try:
            n = min(pool.probe(ids, adapter=adapter).cached_tokens for pool in pools)
            return self._take_over(pools[0], request, self._number(request, adapter), n), False
        except attnd.NotFoundError:  # the daemon began anew
            self._drop_pools()
            return 0, False
        except attnd.AttndError as e:  # nothing depends on a probe
            logger.warning("attnd: a prompt is computed whole: %s", e)
            return 0, False

    def _take_over(self, pool: attnd.Pool, request: Any, number: int | None, n_cached: int) -> int:
        """Makes the sequence this scheduler's that another engine has left of the request, if it has
        more tokens than n_cached, which the cache has; gives how many the request begins with."""
        over = self._over.get(request.request_id)
        if over is not None:
            return over.layer_len[0]
        if number is None:
            return n_cached
        ids = request.all_token_ids
        try:
            seq = pool.adopt(number)
        except (attnd.SequenceGoneError, attnd.OutOfBlocksError):
            return n_cached
        n = min(*seq.layer_len, len(ids) - 1)
        try:
            seq.set_tokens(0, ids[:n])  # refused, if it has others
            is_same = n > n_cached
        except attnd.InvalidArgumentError:
            is_same = False
        if not is_same:
            seq.close()
            return n_cached
        seq.truncate(n)
        seq.layer_len = (n,)
        self._over[request.request_id] = seq
        return n

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        adapter, n = self._adapter(request), num_external_tokens
        over, number = self._over.pop(request.request_id, None), self._number(request, adapter)
        is_there = over is not None and over.layer_len == (n,)
        if over is not None and not is_there:
            self._give_up(over)
        tokens: Sequence[int] = ()
        if adapter is not None and not is_there:
            tokens = request.all_token_ids[: n + 1]
        self.seen[request.request_id] = Seen(request, adapter, n, number)
        self.meta.opened.append(
            Opened(request.request_id, tokens, n, adapter or 0, number, is_there)
        )

    def _give_up(self, over: attnd.Sequence) -> None:
        try:
            over.close()
        except attnd.AttndError:
            pass  # it ends with this session

    def _tell(self, s: Seen, n_computed: int, is_end: bool = False) -> None:
        """The ids of n_computed tokens may follow, if they have filled a block since last time; at
        the request's end in any case."""
        if s.number is not None:
            return  # they are known
        if len(self._names) > 1:  # of tokens since then, another rank's may have failed
            n_computed = min(n_computed, s.n_computed)
        n = min(n_computed, s.request.num_tokens) // self.block_tokens * self.block_tokens
        if s.adapter is not None and n > 0 and (is_end or n > s.n_told):
            self.meta.told.append(Told(s.request.request_id, s.request.all_token_ids[:n]))
            s.n_told = n

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        so, size = scheduler_output, self.block_tokens
        self._n_steps += 1
        # what requests write is told for all of them at once, not in a message of almost every step
        is_due = self._n_steps % size == 0
        for name, n_scheduled in so.num_scheduled_tokens.items():
            s = self.seen.get(name)
            if s is None:
                continue
            s.n_computed = s.request.num_computed_tokens
            if s.number is None:
                if is_due or not s.is_prompt_told(size):
                    self._tell(s, s.n_computed)
            else:
                n = s.request.num_computed_tokens + n_scheduled
                self.meta.told.append(Told(name, s.request.all_token_ids[:n], is_exact=True))
        for name in so.preempted_req_ids or ():
            s = self.seen.pop(name, None)
            if s is not None:
                self._tell(s, s.request.num_tokens, is_end=True)
        meta, self.meta = self.meta, AttndMeta()
        return meta

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        s = self.seen.pop(request.request_id, None)
        if s is not None:
            self._tell(s, s.request.num_tokens, is_end=True)
        over = self._over.pop(request.request_id, None)
        if over is not None:  # aborted before it was scheduled
            self._give_up(over)
        return False, None

    # ---- the worker: the attention backend does it all

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_handshake_metadata(self) -> AttndHandshake | None:
        return None if shared.requests is None else AttndHandshake(shared.requests.pool.spec.name)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return shared.take_invalid_blocks()

    def shutdown(self) -> None:
        self._drop_pools()
