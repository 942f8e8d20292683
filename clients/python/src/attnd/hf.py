"""HuggingFace Transformers models with attnd as their attention and their KV cache.

    import attnd.hf

    model = AutoModelForCausalLM.from_pretrained(...).eval()
    with attnd.hf.attach(model, "ipc:///run/attnd/attnd.sock") as worker:
        ids = worker.generate(**tokenizer(texts, padding=True, return_tensors="pt"))

attach() runs one token through the model to see how each of its layers calls for attention (heads,
scaling, windows, soft cap, sinks), makes a pool of that, and switches the model to the attention
implementation "attnd", which importing this module registers (_hf_calls.py). A Cache maps batch rows to
sequences; left padding stays out of it. Greedy search, sampling, beam search (by fork) and crop (by
truncate) work. What cannot be done is refused with UnsupportedError that names it.

q, k and v of a model on a GPU are copied to pinned host memory, and the output back.
"""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any

try:
    import torch
    import transformers
    from transformers.cache_utils import Cache as _TransformersCache

    from ._hf_calls import NAME, Mask, Probe, Seen, call_of_thread, refuse
except ImportError as e:
    raise ImportError("attnd.hf needs torch and transformers >= 5: pip install attnd[hf]") from e

from . import client as _client
from ._handle import Closing, NotPicklable
from .pool import Items, Pool, Result, Sequence
from .spec import PoolSpec

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_STEP_BYTES = 16 << 20  # of a step's message: longer prompts go in several
_HEADER_BYTES = 1 << 18


class _Plan:
    """Which rows of one forward pass are real tokens of which sequence; the same in all layers.

    runs   (sequence, pos, n_tokens), in batch order; packed tokens are in this order
    index  indices of real tokens in [batch * new tokens], or None if all are
    """

    def __init__(self, cache: Cache, column: int, n_new: int, device: torch.device):
        self.column, self.n_new = column, n_new
        self.runs: list[tuple[Sequence, int, int]] = []
        keep: list[int] = []
        for row, (seq, pad) in enumerate(zip(cache.sequences, cache.pads)):
            n_padding = min(max(pad - column, 0), n_new)
            if n_padding < n_new:
                self.runs.append((seq, max(column - pad, 0), n_new - n_padding))
                keep.extend(range(row * n_new + n_padding, (row + 1) * n_new))
        self.n_tokens = len(keep)
        is_padded = len(keep) < len(cache.sequences) * n_new
        self.index = torch.tensor(keep, device=device) if is_padded else None
        self.chunks = list(self._chunks(cache.worker))

    def _chunks(self, worker: Worker) -> Any:
        """(first packed token, Items) of steps within the daemon's limits."""
        first = begin = 0
        runs: list[tuple[Sequence, int, int]] = []
        for seq, pos, n_tokens in self.runs:
            while n_tokens > 0:
                room = worker.max_tokens - (begin - first)
                if room == 0 or len(runs) == worker.max_items:
                    yield first, Items(runs)
                    first, runs = begin, []
                    continue
                n = min(n_tokens, room)
                runs.append((seq, pos, n))
                pos, n_tokens, begin = pos + n, n_tokens - n, begin + n
        if runs:
            yield first, Items(runs)


class Cache(Closing, _TransformersCache, NotPicklable):
    """The KV cache of one batch, in the daemon; row i of the batch is `sequences[i]`.

    Made by Worker.cache(), given to the model as past_key_values. Left padding is not stored: row i
    has pads[i] columns before its first token. close() forgets the sequences.
    """

    def __init__(self, worker: Worker):
        super().__init__(layers=[])
        self.worker = worker
        self.sequences: list[Sequence] = []
        self.pads: list[int] = []
        self._columns = [0] * worker.pool.spec.num_layers  # tokens and padding, by layer
        self._plan: _Plan | None = None
        self._has_mask = False

    # ---- what transformers asks

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"<attnd.hf.Cache {len(self.sequences)} sequences, {self._columns[0]} columns>"

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kw: Any
    ) -> Any:
        """Passes the new keys and values on; the attention call that follows stores them."""
        call_of_thread.made = self, layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._columns[layer_idx]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._columns[layer_idx]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._columns[layer_idx] + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return len(self.sequences) or -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return True

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row beam_idx[i] was: the first use keeps the sequence, others fork it."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        rows = torch.arange(len(self.sequences))[indices.cpu()]  # indices may be a bool mask
        self._select(rows.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self.sequences)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove columns; a positive number is the columns to keep."""
        now = max(self._columns)
        keep = tokens_to_remove if tokens_to_remove > 0 else now + tokens_to_remove
        if keep >= now:
            return
        keep = max(keep, 0)
        for seq, pad in zip(self.sequences, self.pads):
            if now > max(keep, pad):
                seq.truncate(max(keep - pad, 0))
        self._columns = [min(n, keep) for n in self._columns]
        self._plan = None

    def reset(self) -> None:
        """Forgets the sequences; the cache is as new."""
        sequences, self.sequences, self.pads = self.sequences, [], []
        self._columns = [0] * len(self._columns)
        self._plan, self._has_mask = None, False
        for seq in sequences:
            seq.close()

    def close(self) -> None:
        self.reset()
        self.worker._caches.discard(self)

    # ---- rows

    def _select(self, rows: list[int]) -> None:
        old, taken = self.sequences, set()
        new = []
        for row in rows:
            new.append(old[row].fork() if row in taken else old[row])
            taken.add(row)
        self.sequences, self.pads = new, [self.pads[row] for row in rows]
        self._plan = None
        for row, seq in enumerate(old):
            if row not in taken:
                seq.close()

    def _check_padding(self, mask: Mask, batch_size: int) -> None:
        """Finds the left padding in the first mask, and that later ones agree with it."""
        pads = [0] * batch_size
        if mask.padding is not None:
            self._has_mask = True
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
                if pad + count != mask.kv_length:
                    raise refuse(f"row {row}: padding after a token (pad on the left)")
        elif self._has_mask:
            raise refuse("attention_mask was given before and is missing now")
        if not self.sequences:
            self.sequences = [self.worker.pool.open() for _ in range(batch_size)]
            self.pads = pads
            return
        if len(self.sequences) != batch_size:
            raise refuse(f"a batch of {batch_size} rows on a cache of {len(self.sequences)}")
        before = mask.q_offset
        for row, (old, new) in enumerate(zip(self.pads, pads)):
            # a row that was all padding so far may go on with padding
            if old != new and not (self._has_mask and old >= before and new >= before):
                raise refuse(f"row {row} has {new} columns of padding, had {old}")
        self.pads = pads

    # ---- one layer of one forward pass

    def attend(
        self,
        layer: int,
        seen: Seen,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Mask,
    ) -> torch.Tensor:
        worker = self.worker
        worker.seen[layer].check(layer, seen)
        batch, heads, n_new, _ = query.shape
        column = self._columns[layer]
        if (mask.q_offset, mask.q_length, mask.kv_length) != (column, n_new, column + n_new):
            raise refuse(
                f"layer {layer}: a mask of queries {mask.q_offset}+{mask.q_length}, keys"
                f" {mask.kv_length}; the cache has {column} columns and {n_new} are new"
            )
        plan = self._plan
        if layer == 0 or plan is None or (plan.column, plan.n_new) != (column, n_new):
            self._check_padding(mask, batch)
            plan = self._plan = _Plan(self, column, n_new, query.device)
        q, k, v = (
            x.transpose(1, 2).reshape(batch * n_new, x.shape[1], x.shape[3])
            for x in (query, key, value)
        )
        if plan.index is not None:
            q, k, v = (x.index_select(0, plan.index) for x in (q, k, v))
        out = worker._run(layer, plan, q, k, v)
        self._columns[layer] = column + n_new
        if plan.index is not None:
            padded = out.new_zeros(batch * n_new, heads, out.shape[2])
            out = padded.index_copy_(0, plan.index, out)
        return out.view(batch, n_new, heads, out.shape[2])


class Spent:
    """Time of a worker's steps so far, summed; nanoseconds as in attnd.Result.

    copy_ns  of q, k and v to the host, which includes the wait for the model to have made them
    """

    def __init__(self) -> None:
        self.n_steps = 0
        self.total_ns = self.queue_ns = self.device_ns = self.copy_ns = 0

    def add(self, r: Result) -> None:
        self.n_steps += 1
        self.total_ns += r.total_ns
        self.queue_ns += r.queue_ns
        self.device_ns += r.device_ns


class Worker(Closing, NotPicklable):
    """A model that runs over a pool. Made by attach(); as a context manager it detaches itself.

    spent  what its steps took; set a new Spent() to begin again
    """

    def __init__(
        self, model: Any, client: _client.Client, owns_client: bool, seen: dict[int, Seen]
    ):
        self.model = model
        self.client = client
        self.seen = seen
        self.pool: Pool = None  # type: ignore[assignment]  # attach() sets it
        self._owns_client = owns_client
        self._caches: set[Cache] = set()
        self._old_implementation: Any = None
        self._staging = threading.local()  # a thread's host buffers, by name
        self.spent = Spent()

    def _use(self, pool: Pool) -> None:
        info, spec = self.client.info, pool.spec
        element = 4 if spec.q_dtype == "f32" else 2
        kv = spec.num_kv_heads * (spec.head_dim_k + spec.head_dim_v)
        token_bytes = element * (spec.num_q_heads * max(spec.head_dim_k, spec.head_dim_v) + kv)
        room = min(_STEP_BYTES, info.max_message_bytes - _HEADER_BYTES)
        self.max_tokens = max(1, min(info.max_step_tokens, room // token_bytes))
        self.max_items = info.max_step_items
        self.pool = pool

    def cache(self) -> Cache:
        """A new, empty cache, to be passed to the model as past_key_values; close it after use."""
        cache = Cache(self)
        self._caches.add(cache)
        return cache

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's generate(); the sequences are closed at its end.

        Pass past_key_values=worker.cache() to keep them.
        """
        if kwargs.get("past_key_values") is not None:
            return self.model.generate(*args, **kwargs)
        with self.cache() as cache:
            return self.model.generate(*args, past_key_values=cache, **kwargs)

    def close(self) -> None:
        """Gives the model its former attention back and closes what belongs to this worker."""
        if self._old_implementation is not None:
            self.model.set_attn_implementation(self._old_implementation)
            self._old_implementation = None
        try:
            for cache in list(self._caches):
                cache.close()
        finally:
            if self.pool is not None:
                self.pool.close()
            if self._owns_client:
                self.client.close()

    # ---- steps

    def _run(self, layer: int, plan: _Plan, q: Any, k: Any, v: Any) -> torch.Tensor:
        """The steps of packed q, k and v; the output on their device."""
        out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
        run = self._step_host if q.device.type == "cpu" else self._step_device
        for first, items in plan.chunks:
            rows = slice(first, first + items.n_tokens)
            run(layer, items, q[rows], k[rows], v[rows], out[rows])
        return out

    def _step_host(self, layer: int, items: Items, q: Any, k: Any, v: Any, out: Any) -> None:
        r = self.pool.step(layer, items, q.contiguous(), k.contiguous(), v.contiguous(), out=out)
        self.spent.add(r)

    def _pinned(self, name: str, n: int, dtype: torch.dtype) -> torch.Tensor:
        buffers = self._staging.__dict__
        buffer = buffers.get(name)
        if buffer is None or buffer.numel() < n:
            buffer = buffers[name] = torch.empty(n, dtype=dtype, pin_memory=True)
        return buffer[:n]

    def _step_device(self, layer: int, items: Items, q: Any, k: Any, v: Any, out: Any) -> None:
        """One copy to the host, the step, one copy back, on the current stream.

        The wait before the step also covers the copy back of the step before, which may still read
        the staging buffer.
        """
        start = time.monotonic_ns()
        packed = torch.cat([q.reshape(-1), k.reshape(-1), v.reshape(-1)])
        staged = self._pinned("in", packed.numel(), q.dtype)
        staged.copy_(packed, non_blocking=True)
        torch.cuda.current_stream(q.device).synchronize()
        self.spent.copy_ns += time.monotonic_ns() - start
        sizes = [q.numel(), k.numel(), v.numel()]
        host_q, host_k, host_v = torch.split(staged, sizes)
        host_out = self._pinned("out", out.numel(), out.dtype).view(out.shape)
        r = self.pool.step(
            layer,
            items,
            host_q.view(q.shape),
            host_k.view(k.shape),
            host_v.view(v.shape),
            out=host_out,
        )
        self.spent.add(r)
        out.copy_(host_out, non_blocking=True)


def _check_config(config: Any) -> None:
    """Refuses what can be seen in a config; the rest shows in the calls."""
    if getattr(config, "is_encoder_decoder", False):
        raise refuse("encoder-decoder models")
    text = config.get_text_config()
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            raise refuse(f"layer type {kind!r}; it knows {' and '.join(_LAYER_TYPES)}")
    if getattr(text, "layer_types", None) is None and getattr(text, "attention_chunk_size", None):
        raise refuse("chunked attention (attention_chunk_size)")
    if getattr(text, "num_kv_shared_layers", None):
        raise refuse("layers that share keys and values (num_kv_shared_layers)")
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", None):
        raise refuse("bidirectional attention")


def _pool_spec(model: Any, seen: dict[int, Seen], options: dict[str, Any]) -> PoolSpec:
    n_layers = len(seen)
    if sorted(seen) != list(range(n_layers)) or n_layers == 0:
        raise refuse(f"layers {sorted(seen)} attend; they must be 0, 1, ...")
    geometry = seen[0].geometry
    for layer, s in sorted(seen.items()):
        for what, value in s.geometry.items():
            if value != geometry[what]:
                raise refuse(
                    f"layer {layer} has {what} {value}, layer 0 has {geometry[what]}: a pool has one"
                )
    if geometry["dtype"] not in _DTYPES:
        raise refuse(f"dtype {geometry['dtype']}")
    layers = tuple(seen[i].spec() for i in range(n_layers))
    config = model.config
    spec = PoolSpec(
        name=options.pop("name") or "",
        num_layers=n_layers,
        num_q_heads=geometry["query heads"],
        num_kv_heads=geometry["KV heads"],
        head_dim_k=geometry["head_dim of k"],
        head_dim_v=geometry["head_dim of v"],
        q_dtype=_DTYPES[geometry["dtype"]],
        layers=layers[:1] if all(layer == layers[0] for layer in layers) else layers,
        model=getattr(config, "_name_or_path", "") or config.model_type,
        **options,
    )
    if spec.name:
        return spec
    digest = hashlib.sha256(repr(spec._replace(n_blocks=0)).encode()).hexdigest()[:12]
    return spec._replace(name=f"{config.model_type}-{digest}")


def attach(
    model: Any,
    client: _client.Client | str,
    *,
    name: str | None = None,
    n_blocks: int = 0,
    block_tokens: int = 0,
    kv_dtype: str | None = None,
    is_batch_invariant: bool = False,
) -> Worker:
    """Makes a pool for a causal language model and has the model attend through it.

    model   a transformers model in eval mode, in f32, f16 or bf16, on the CPU or one GPU
    client  an attnd.Client, or a url to connect to
    name    the pool's; None: made of the model's type and geometry
    others  as in PoolSpec; n_blocks 0 takes what is left of the daemon's KV memory

    Raises UnsupportedError for a model that needs what attnd cannot do, naming it, and what
    Client.create_pool() raises.
    """
    if int(transformers.__version__.split(".")[0]) < 5:
        raise refuse(f"transformers {transformers.__version__}: it needs 5 or newer")
    if model.training:
        raise refuse("a model in training mode: call model.eval()")
    _check_config(model.config)
    old = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    owned: _client.Client | None = None
    try:
        if model.config.get_text_config()._attn_implementation != NAME:
            raise refuse(f"{type(model).__name__} does not take a registered attention")
        probe = Probe()
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            model(input_ids=token, past_key_values=probe, use_cache=True)
        options = {
            "name": name,
            "n_blocks": n_blocks,
            "block_tokens": block_tokens,
            "kv_dtype": kv_dtype,
            "is_batch_invariant": is_batch_invariant,
        }
        spec = _pool_spec(model, probe.seen, options)
        if isinstance(client, str):
            client = owned = _client.connect(client)
        worker = Worker(model, client, owned is not None, probe.seen)
        worker._use(client.create_pool(spec))
        worker._old_implementation = old
        return worker
    except BaseException:
        model.set_attn_implementation(old)
        if owned is not None:
            owned.close()
        raise
