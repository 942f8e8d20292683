"""vLLM's CPU worker with attnd: tells requests.py of each step before the model runs."""

from __future__ import annotations

from typing import Any

import attnd
from vllm.model_executor.model_loader import base_loader
from vllm.v1.worker.cpu_worker import CPUWorker

from attnd.serving import model as serving_model
from attnd.serving.requests import Requests

from . import settings


class Shared:
    """What the worker, the attention backend and the connector of one process share."""

    def __init__(self) -> None:
        self.runner: Any = None
        self.weights = ""  # a digest
        self.requests: Requests | None = None
        self.layers: dict[str, int] = {}  # of the pool, by vLLM's names
        self.block_tokens = 0

    def take_invalid_blocks(self) -> set[int]:
        """vLLM's blocks from which on tokens have to be computed again."""
        if self.requests is None:
            return set()
        invalid = set()
        for request, n_tokens in self.requests.take_failed().items():
            state = self.runner.requests.get(request)
            if state is not None:  # else it has ended since
                (blocks,) = state.block_ids
                invalid.add(blocks[n_tokens // self.block_tokens])
        return invalid


shared = Shared()


def model_name(config: Any, weights: str) -> str:
    """What K and V mean: equal for engines that may share them."""
    model = config.model_config
    config = model.hf_text_config.to_dict()
    return serving_model.model_name(weights, model.dtype, model.quantization, config)


def connect(name: str) -> attnd.Client:
    return attnd.connect(
        settings.endpoint(), timeout=settings.TIMEOUT_S, max_retries=1000, name=name
    )


class AttndCpuWorker(CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        shared.runner = self.model_runner

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
            super().load_model(*args, **kwargs)
        finally:
            base_loader.process_weights_after_loading = process
        if not shared.weights:
            raise ValueError(
                f"attnd-vllm: load_format {self.vllm_config.load_config.load_format!r} does not"
                " show the model's weights, so it can't be told whose cache fits them"
            )

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("attnd-vllm: weights can't change, the cache has K and V of these")

    start_weight_update = update_weights = start_draft_weight_update = reload_weights

    def execute_model(self, scheduler_output: Any) -> Any:
        so, meta = scheduler_output, scheduler_output.kv_connector_metadata
        if shared.requests is not None:
            ended = {*so.finished_req_ids, *(so.preempted_req_ids or ())}
            shared.requests.begin(ended, getattr(meta, "opened", ()), getattr(meta, "told", ()))
        return super().execute_model(scheduler_output)

    def shutdown(self) -> None:
        if shared.requests is not None:
            shared.requests.close()
            shared.requests = None
        super().shutdown()
