"""vLLM's worker with attnd: tells requests.py of each step before the model runs, and lets no token
out before the step's layers are known to have been computed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import attnd
from vllm.model_executor.model_loader import base_loader
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput

from attnd.serving import model as serving_model
from attnd.serving.requests import Requests

from . import settings, versions
from .lane import Metadata, Way, graph_sizes, open_lane


def check_limits(info: attnd.ClientInfo, config: Any, n_fillers: int) -> None:
    """Raises ValueError, naming both settings, where the engine may ask for more than the daemon allows.
    Each rank has a sequence for each request; n_fillers more fill the largest graph."""
    n_seqs, n_ranks = config.scheduler_config.max_num_seqs, config.parallel_config.tensor_parallel_size
    n_tokens = config.model_config.max_model_len
    of_all = "max_num_seqs" if n_ranks == 1 else f"max_num_seqs on {n_ranks} ranks together"
    if n_fillers > 0:
        of_all += f" with the {n_fillers} that fill the largest CUDA graph"
    for name, n, setting, most in (
        ("max_num_seqs", n_seqs, "engine.max_step_items", info.max_step_items),
        ("max_model_len", n_tokens, "cache.max_seq_tokens", info.max_seq_tokens),
        (of_all, n_seqs * n_ranks + n_fillers, "cache.max_sequences", info.max_sequences),
    ):
        if n > most > 0:  # 0: a daemon that does not say
            raise ValueError(
                f"attnd-vllm: {name} is {n}, more than the daemon's {setting}, which is {most}:"
                " change either"
            )


_log = logging.getLogger("attnd_vllm")


class Shared:
    """What the worker, the attention backend and the connector of one process share."""

    def __init__(self) -> None:
        self.client: attnd.Client | None = None
        self.lane: attnd.Lane | None = None  # None: there can't be one
        self.batch: versions.Batch | None = None
        self.blocks = versions.Blocks()
        self.weights = ""  # digests, of each rank's
        self.requests: Requests | None = None
        self.way: Way | None = None
        self.metadata: Metadata | None = None  # of the step that is on its way
        self.latest: frozenset[str] = frozenset()  # requests of the latest step, which may be on its way
        self.is_in_step = False  # what runs is the scheduler's, no trial
        self.layers: dict[str, int] = {}  # of the pool, by vLLM's names
        self.block_tokens = 0

    def take_invalid_blocks(self) -> set[int]:
        """vLLM's blocks from which on tokens have to be computed again."""
        if self.requests is None:
            return set()
        invalid = set()
        for request, n_tokens in self.requests.take_failed().items():
            block = self.blocks.at(request, n_tokens, self.block_tokens)
            if block is not None:
                invalid.add(block)
        return invalid


shared = Shared()


def model_name(config: Any, weights: str) -> str:
    """What K and V mean: equal for engines that may share them."""
    model = config.model_config
    config = model.hf_text_config.to_dict()
    return serving_model.model_name(weights, model.dtype, model.quantization, config)


def connect(name: str, rank: int, size: int) -> attnd.Client:
    """To the daemon of a rank."""
    url = settings.endpoint(rank, size)
    return attnd.connect(url, timeout=settings.TIMEOUT_S, max_retries=1000, name=name)


class _Checked(AsyncModelRunnerOutput):
    """Tokens that are on their way from the GPU."""

    def __init__(self, output: AsyncModelRunnerOutput, worker: AttndWorker, m: Metadata | None):
        self._output, self._worker, self._metadata = output, worker, m

    def get_output(self) -> ModelRunnerOutput:
        return self._worker.checked(self._output.get_output(), self._metadata)


class AttndWorker:
    """Part of a worker class, before vLLM's own."""

    vllm_config: Any
    model_runner: Any

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        shared.batch = versions.Batch(self.model_runner)
        shared.client = connect("vllm", *versions.rank_and_size())
        shared.lane = open_lane(shared.client, self.model_runner.device, self.vllm_config)
        sizes = graph_sizes(self.vllm_config) if shared.lane is not None else []
        check_limits(shared.client.info, self.vllm_config, max(sizes, default=0))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Takes the weights' digest before they are packed for the processor, which hides them."""
        process = base_loader.process_weights_after_loading

        def digest_and_process(model: Any, *a: Any, **k: Any) -> Any:
            shared.weights = serving_model.digest_of_weights(
                serving_model.model_tensors(model)
            )
            return process(model, *a, **k)

        base_loader.process_weights_after_loading = digest_and_process
        try:
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        finally:
            base_loader.process_weights_after_loading = process
        if not shared.weights:
            raise ValueError(
                f"attnd-vllm: load_format {self.vllm_config.load_config.load_format!r} does not"
                " show the model's weights, so it can't be told whose cache fits them"
            )
        # what one rank computes depends on all ranks' weights
        shared.weights = " ".join(versions.gathered(shared.weights))
        if shared.lane is None:  # with one a step's rows are lost before its layers, or not at all
            versions.wrap_forward(self.model_runner, self._run_model)

    def _run_model(self, forward: Callable[[], Any]) -> Any:
        """A pass, again where attnd has lost what vLLM can't be told to compute again. The ranks do so
        together, as each waits for the others in every layer."""
        output = forward()
        while (m := shared.metadata) is not None and m.step is not None:
            if not versions.is_any(m.step.is_lost):
                break
            _log.warning("attnd has lost sequences between two layers: the step is computed again")
            m.step.again()
            output = forward()
        return output

    def get_kv_cache_spec(self) -> Any:
        return versions.small_specs(super().get_kv_cache_spec())  # type: ignore[misc]

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("attnd-vllm: weights can't change, the cache has K and V of these")

    start_weight_update = update_weights = start_draft_weight_update = reload_weights

    @property
    def _is_async(self) -> bool:
        return bool(self.vllm_config.scheduler_config.async_scheduling)

    def execute_model(self, scheduler_output: Any) -> Any:
        so, meta = scheduler_output, scheduler_output.kv_connector_metadata
        shared.blocks.follow(so)
        if shared.requests is not None and shared.way is not None:
            ended = {*so.finished_req_ids, *(so.preempted_req_ids or ())}
            opened, told = getattr(meta, "opened", ()), getattr(meta, "told", ())
            begun = {o.request for o in opened}
            if not shared.latest.isdisjoint(ended | begun):
                # their step may be on its way: a scheduler's that is ahead, or a trial's,
                # whose tokens nobody has waited for
                shared.way.settle()
            shared.requests.begin(ended, opened, told)
        shared.metadata, shared.is_in_step = None, True
        try:
            output = super().execute_model(scheduler_output)  # type: ignore[misc]
        finally:
            shared.is_in_step = False
            if shared.batch is not None:
                shared.batch.forget()
        if self._is_async and shared.requests is not None and shared.requests.failed:
            failed = ", ".join(sorted(shared.requests.failed))
            raise RuntimeError(
                f"attnd-vllm: attnd can't compute a step's tokens of {failed}, and the scheduler has"
                " gone on already: without ATTND_VLLM_ASYNC it would compute them again"
            )
        return self._checking(output)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self._checking(super().sample_tokens(*args, **kwargs))  # type: ignore[misc]

    def _checking(self, output: Any) -> Any:
        if isinstance(output, AsyncModelRunnerOutput):
            return _Checked(output, self, shared.metadata)
        if isinstance(output, ModelRunnerOutput):
            return self.checked(output, shared.metadata)
        return output

    def checked(self, output: ModelRunnerOutput, m: Metadata | None) -> ModelRunnerOutput:
        """The output of a step whose tokens are there, after its layers were; where they have failed,
        with what vLLM has to compute again. Raises what it can't be told."""
        if m is None or shared.way is None or shared.requests is None:
            return output
        try:
            shared.way.check()
        except attnd.AttndError as e:
            rows = () if m.step is None else m.step.rows
            lost = [r.request for r in rows if self._is_async or (r.is_sampled and not r.may_fail)]
            if lost:
                raise RuntimeError(
                    f"attnd-vllm: a layer has failed, and vLLM can't be told to compute the tokens of"
                    f" {', '.join(lost)} again"
                ) from e
            for r in rows:
                shared.requests.fail(r)
            if output.kv_connector_output is None:
                output.kv_connector_output = KVConnectorOutput()
            output.kv_connector_output.invalid_block_ids |= shared.take_invalid_blocks()
        return output

    def shutdown(self) -> None:
        if shared.way is not None:
            shared.way.close()
            shared.way = shared.lane = None
        if shared.requests is not None:
            shared.requests.close()
            shared.requests = None
        super().shutdown()  # type: ignore[misc]
