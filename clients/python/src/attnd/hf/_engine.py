"""Continuous batching of transformers over attnd: model.generate_batch(), init_continuous_batching() and
`transformers serve`, of an attached model.

Requests, scheduling, sampling and results are transformers'. Here is what is ours of it: the manager
makes a PagedCache where it made a cache of its own, and what happens to requests when blocks run out or
the daemon was restarted: they are computed again from their tokens, of which the cache may have a part.
"""

from __future__ import annotations

import time
import types
import weakref
from typing import TYPE_CHECKING, Any

from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

from ..errors import (
    AttndError,
    OutOfBlocksError,
    OverloadedError,
    PoolGoneError,
    SequenceGoneError,
    SessionGoneError,
)
from ._calls import NAME
from ._handed import refuse
from ._indexed import is_indexed
from ._paged import PagedCache

if TYPE_CHECKING:
    from ._worker import Worker

_api: Any = continuous_api
_MAX_BATCH_TOKENS = 8192  # transformers' own default
_PATIENCE = 60.0  # seconds that a request waits for blocks that others have
_PAUSE = 0.02
# Settings of a ContinuousBatchingConfig that say something of a cache that is not there, and their
# defaults.
_SETTINGS = {
    "page_size": (256, "blocks have block_tokens= of attach()"),
    "num_blocks": (None, "pools have n_blocks= of attach()"),
    "max_memory_percent": (None, "pools have n_blocks= of attach()"),
    "max_blocks_per_request": (None, "there are no block tables"),
    "cpu_offload_space": (0.0, "cache.host_memory is the daemon's"),
    "use_async_batching": (None, "a batch begins when the one before it is done"),
    "use_cuda_graph": (None, "a batch changes its shape"),
    "varlen_compile_config": (None, "a batch changes its shape"),
    "decode_compile_config": (None, "a batch changes its shape"),
    "default_compile_level": (0, "a batch changes its shape"),
    "q_padding_interval_size": (0, "nothing is padded"),
    "kv_padding_interval_size": (0, "nothing is padded"),
}


def _check(worker: Worker, config: Any) -> None:
    """Refuses what continuous batching over attnd cannot do."""
    for name, (default, why) in _SETTINGS.items():
        given = getattr(config, name, default)
        if given != default and given not in (False, (False, False)):
            raise refuse(f"continuous batching with {name} {given!r}: {why}")
    if config.scheduler_type not in SCHEDULER_MAPPING:
        raise refuse(f"continuous batching with scheduler_type {config.scheduler_type!r}")
    if getattr(worker.model, "_device_mesh", None) is not None:
        raise refuse("continuous batching of a model over several devices")
    text = worker.config
    if worker.cache_has_states:
        raise refuse("continuous batching of a model with recurrent or convolution states")
    if is_indexed(worker.config):
        raise refuse("continuous batching of a model whose queries visit what an indexer chooses")
    if getattr(text, "num_kv_shared_layers", None):
        raise refuse("continuous batching of a model whose layers share keys and values")
    if any(seen.chunk for seen in worker.seen.values()):
        raise refuse("continuous batching of a model with chunked layers")
    if getattr(text, "compile_config", None) is not None:
        raise refuse("continuous batching with compile_config: a batch changes its shape")


class _Room:
    """What makes room when the scheduler finds none; in place of offloading to the host."""

    def __init__(self, processor: _Processor):
        self._processor = processor

    def offload_requests(self) -> bool:
        """The newest of the requests that found none begins anew when there is some."""
        processor, scheduler = self._processor, self._processor.scheduler
        starved = scheduler.starved_requests
        if not starved:
            return False
        state, n_tokens = starved.pop()
        if len(scheduler.active_requests) > 1:
            processor.begin_anew(state)
        else:  # it has all there is
            processor.fail(state, processor.too_long(state.current_len() + n_tokens))
        return True

    def restore_scheduled_requests(self, requests_in_batch: Any) -> None:
        pass

    def free_request_cpu_cache(self, state: Any) -> None:
        pass

    def free_all_waiting_cpu_caches(self) -> None:
        pass

    def reset(self) -> None:
        pass


class _Processor(_api.ContinuousBatchProcessor):  # type: ignore[misc]
    """Steps of a batch, and what becomes of the requests whose step failed."""

    def __init__(self, worker: Worker, **kwargs: Any):
        super().__init__(**kwargs)
        self._worker = worker
        self._waits: dict[str, float] = {}  # since when a request alone finds no blocks
        self._add_waiting = self.scheduler.add_waiting_request
        self.scheduler.add_waiting_request = self._add_if_it_fits
        self.offloading_manager = _Room(self)

    def too_long(self, n_tokens: int) -> OutOfBlocksError:
        spec, n_blocks = self._worker.pool.spec, self.cache.num_blocks
        return OutOfBlocksError(
            f"a request of {n_tokens} tokens, and the pool {spec.name!r} has {n_blocks} blocks of"
            f" {spec.block_tokens}"
        )

    def _add_if_it_fits(self, state: Any) -> None:
        n = len(state.initial_tokens)
        if not self.cache.can_ever_hold(n):
            raise self.too_long(n)
        self._add_waiting(state)

    def fail(self, state: Any, error: Exception) -> None:
        self._handle_request_error(error, state)
        self._waits.pop(state.request_id, None)
        self.scheduler.finish_request(state.request_id)

    def begin_anew(self, state: Any) -> None:
        """Gives a request's blocks back; it waits with all of its tokens as its prompt."""
        scheduler = self.scheduler
        again = state.create_equivalent_initial_request()
        state._status = RequestStatus.FINISHED
        if state in scheduler._requests_to_fork:
            scheduler._requests_to_fork.remove(state)
        scheduler.finish_request(state.request_id)
        self._add_waiting(again)
        scheduler.block_new_requests = bool(scheduler.active_requests)

    def prepare_next_batch(self) -> bool:
        if not self.scheduler.active_requests:
            self.scheduler.block_new_requests = False
        return bool(super().prepare_next_batch())

    def _generation_step(self, model: Any) -> None:
        io = self.inputs_and_outputs
        left_out: set[str] = set()
        # the positions were raised when the batch was made
        batch = [
            (r.state.request_id, r.state.position_offset - r.query_length, r.query_length)
            for r in io.requests_in_batch
        ]
        while any(request_id not in left_out for request_id, _, _ in batch):
            try:
                self.cache.begin(batch, left_out)
                super()._generation_step(model)
                self._worker.layers.check()
                break
            except (OutOfBlocksError, OverloadedError) as e:  # of blocks, or of sequences
                self._make_room(left_out, e)
            except (SessionGoneError, PoolGoneError, SequenceGoneError):
                self._worker.reopen()
                self.cache.is_closed = self.cache.is_gone = False
                self._worker._caches.add(self.cache)
                for state in list(self.scheduler.active_requests.values()):
                    left_out.add(state.request_id)
                    self.begin_anew(state)
                left_out.update(r.state.request_id for r in io.requests_in_batch)
        self._leave_out(left_out)
        for r in io.requests_in_batch:
            self._waits.pop(r.state.request_id, None)
            self.cache.tell(r.state)

    def _make_room(self, left_out: set[str], error: AttndError) -> None:
        """Has one request begin anew: one that is not in the batch, or its last one."""
        io, active = self.inputs_and_outputs, self.scheduler.active_requests
        batch = [r.state for r in io.requests_in_batch if r.state.request_id not in left_out]
        ids = {state.request_id for state in batch}
        others = [state for i, state in active.items() if i not in ids and i not in left_out]
        state = (others or batch)[-1]
        left_out.add(state.request_id)
        if len(active) > 1:
            self.begin_anew(state)
            return
        # other processes have the blocks
        since = self._waits.setdefault(state.request_id, time.monotonic())
        if time.monotonic() - since > _PATIENCE:
            self.fail(state, error)
        else:
            self.begin_anew(state)
            time.sleep(_PAUSE)

    def _leave_out(self, left_out: set[str]) -> None:
        """The batch and its tokens without these requests'."""
        io = self.inputs_and_outputs
        if not left_out:
            return
        kept, columns, column = [], [], 0
        for r in io.requests_in_batch:
            if r.state.request_id not in left_out:
                kept.append(r)
                columns += [column] if r.has_new_token else []
            column += r.has_new_token
        io.output_ids[:, : len(columns)] = io.output_ids[:, columns]
        io.requests_in_batch, io.num_request_in_batch = kept, len(kept)


class Manager(_api.ContinuousBatchingManager):  # type: ignore[misc]
    """Requests of one attached model."""

    def __init__(self, worker: Worker, **kwargs: Any):
        self._worker = worker
        super().__init__(model=worker.model, **kwargs)
        # what was not asked for is not to be chosen either
        config = self.continuous_batching_config
        config.use_cuda_graph, config.use_async_batching = (False, False), False
        config.max_blocks_per_request = 0

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        self._worker.check_attached()  # it stays as it is

    def stop(self, *args: Any, **kwargs: Any) -> None:
        processor = self.batch_processor
        super().stop(*args, **kwargs)
        if processor is not None and not self.is_running():
            processor.cache.close()

    def _create_batch_processor(self) -> Any:
        made = getattr(self, "batch_processor", None)
        if made is not None:
            made.reset()
            return made
        config, model = self.continuous_batching_config, self.model
        n_tokens = config.max_batch_tokens or _MAX_BATCH_TOKENS
        cache = PagedCache(self._worker, n_tokens, config.allow_block_sharing)
        self._use_prefix_sharing = cache.use_prefix_sharing
        _api.update_cb_config_after_cache_creation(config, cache.num_blocks, n_tokens)
        kind: Any = SCHEDULER_MAPPING[config.scheduler_type]
        scheduler = kind(
            cache=cache,
            safety_margin=config.safety_margin,
            max_requests_per_batch=config.max_requests_per_batch,
        )
        return _Processor(
            self._worker,
            cache=cache,
            config=model.config.get_text_config(),
            generation_config=self.generation_config,
            continuous_batching_config=config,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue,
            cancel_queue=self.cancel_queue,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=model.device,
            model_dtype=model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )


def init_of(worker: Worker) -> Any:
    """The model's init_continuous_batching(), which generate_batch() and servers call."""
    mine = weakref.ref(worker)

    def init_continuous_batching(
        self: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        worker = mine()
        config = continuous_batching_config
        if worker is None or worker.model is not self:  # a copy of the model
            raise refuse("continuous batching of a model that is not attached itself")
        if worker._switch.now != NAME:
            raise refuse(f"continuous batching of a model set to {worker._switch.now!r}")
        if getattr(self, "_cached_continuous_batching_manager", None) is not None:
            raise refuse("continuous batching with persistent_manager=True")
        generation_config = generation_config or self.generation_config
        config = config or _api.ContinuousBatchingConfig()
        _check(worker, config)
        if generation_config.eos_token_id is None:
            generation_config.eos_token_id = -1
        return Manager(
            worker,
            generation_config=generation_config,
            continuous_batching_config=config,
            workload_hints=workload_hints,
        )

    return types.MethodType(init_continuous_batching, worker.model)
