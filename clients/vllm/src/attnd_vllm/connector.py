"""The scheduler's side: what attnd has of a prompt counts as computed.

The scheduler only probes. What a request begins with, and the ids of what it has computed, go to the
worker with the step's metadata, which opens, tells and closes in one message.
"""

from __future__ import annotations

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
    """What the worker tells the scheduler once."""

    pool: str


class Seen:
    """A request that was scheduled: what its blocks depend on, and the tokens whose ids were told."""

    def __init__(self, request: Any, adapter: int | None, n_told: int):
        self.request, self.adapter, self.n_told = request, adapter, n_told


class AttndConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.block_tokens = vllm_config.cache_config.block_size
        self._pool: attnd.Pool | None = None
        self._name: str | None = None
        self.seen: dict[str, Seen] = {}
        self.meta = AttndMeta()
        self._unknown: set[str] = set()  # why requests don't share, each said once

    # ---- the scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._name = metadata[0].pool

    def _probed(self) -> attnd.Pool | None:
        """The worker's pool; None: it has not made it (again) yet."""
        if self._pool is not None:
            return self._pool
        if self._name is None:
            return None
        client = connect("vllm-scheduler")
        try:
            self._pool = client.pool(self._name)
        except attnd.NotFoundError:
            client.close()
        return self._pool

    def _drop_pool(self) -> None:
        if self._pool is not None:
            self._pool.client.close()
        self._pool = None

    def _adapter(self, request: Any) -> int | None:
        """None: the request must not share."""
        try:
            return identity.adapter_of(request)
        except identity.Unknown as e:
            if str(e) not in self._unknown:
                self._unknown.add(str(e))
                logger.warning("attnd: a request does not share its prefix: %s", e)
            return None

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if num_computed_tokens != 0:
            raise RuntimeError("attnd-vllm: vLLM's own prefix cache is on")
        adapter, pool = self._adapter(request), self._probed()
        if adapter is None or pool is None:
            return 0, False
        try:
            probe = pool.probe(request.all_token_ids, adapter=adapter)
        except attnd.NotFoundError:  # the daemon began anew
            self._drop_pool()
            return 0, False
        except attnd.AttndError as e:  # nothing depends on a probe
            logger.warning("attnd: a prompt is computed whole: %s", e)
            return 0, False
        return probe.cached_tokens, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        adapter, n = self._adapter(request), num_external_tokens
        tokens: Sequence[int] = ()
        if adapter is not None:
            tokens = request.all_token_ids[: n + 1]
        self.seen[request.request_id] = Seen(request, adapter, n)
        self.meta.opened.append(Opened(request.request_id, tokens, n, adapter or 0))

    def _tell(self, s: Seen, n_computed: int, is_end: bool = False) -> None:
        """The ids of n_computed tokens may follow, if they have filled a block since last time; at
        the request's end in any case."""
        n = min(n_computed, s.request.num_tokens) // self.block_tokens * self.block_tokens
        if s.adapter is not None and n > 0 and (is_end or n > s.n_told):
            self.meta.told.append(Told(s.request.request_id, s.request.all_token_ids[:]))
            s.n_told = n

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        so = scheduler_output
        for name in so.num_scheduled_tokens:
            if name in self.seen:
                self._tell(self.seen[name], self.seen[name].request.num_computed_tokens)
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
        self._drop_pool()
