"""A model that runs over pools: its caches, its steps, closing."""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import transformers
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

from .._handle import Closing, NotPicklable
from ..errors import (
    AttndError,
    PoolGoneError,
    SequenceGoneError,
    SessionGoneError,
)
from ..pool import Items, Pool, Result, Sequence
from ..serving.copies import HALVES_BYTES, IN_FLIGHT, Part, Staging
from ..spec import PoolSpec
from ._cache import Cache
from ._calls import NAME, Seen
from ._graphs import Graphs
from ._handed import refuse
from ._lane import Layers
from ._minimax import cache_class
from ._named import VERSION, cache_of, with_cache
from ._paged import PagedCache
from ._rows import close_all
from ._states import States

if TYPE_CHECKING:
    from ..client import Client
    from ._pool import Pools
    from ._prefix import Sharing
    from ._rows import Packed
    from ._switch import Switch


_STEP_BYTES = 16 << 20  # of a step's message: longer prompts go in several
_HEADER_BYTES = 1 << 18


class Spent:
    """Time of a worker's steps so far, summed; nanoseconds as in attnd.Result.

    copy_ns  of q, k and v from a GPU, with the wait for the model to have made them
    """

    def __init__(self) -> None:
        self.n_steps = 0
        self.total_ns = self.queue_ns = self.device_ns = self.copy_ns = 0

    def add(self, r: Result) -> None:
        self.n_steps += 1
        self.total_ns += r.total_ns
        self.queue_ns += r.queue_ns
        self.device_ns += r.device_ns


def _token_bytes(spec: PoolSpec) -> int:
    """Of a step's message."""
    element = 4 if spec.q_dtype == "f32" else 2
    kv = spec.num_kv_heads * (spec.head_dim_k + spec.head_dim_v)
    return element * (spec.num_q_heads * max(spec.q_row, spec.out_row) + kv)


def _step_limits(client: Client, token_bytes: int, n_at_once: int) -> tuple[int, int]:
    """Tokens and items of one step, in whichever pool, if there is room for so many steps."""
    info = client.info
    room = min(_STEP_BYTES, (info.max_message_bytes - _HEADER_BYTES) // n_at_once)
    return max(1, min(info.max_step_tokens, room // token_bytes)), info.max_step_items


def _windows_of_caches(config: Any, seen: dict[int, Seen]) -> dict[int, int]:
    """Layers whose masks show more than the model's own cache keeps, and how much it keeps."""
    window = getattr(config, "sliding_window", None)
    if not window:
        return {}
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * (max(seen) + 1)
    return {
        layer: window
        for layer, s in seen.items()  # behind the config's there are those of layers that loop
        if layer < len(kinds)
        and kinds[layer] == "sliding_attention"
        and not 0 < s.window <= window
    }


class _Generating:
    """A worker's generate(), and the caches that it made for what runs besides."""

    def __init__(self, worker: Worker, stack: contextlib.ExitStack):
        self._worker = worker
        self._stack = stack  # closes them at the end
        self._replaced: list[Any] = []

    def cache_for(self, worker: Worker | None, given: Any) -> Any:
        """One of worker's in place of none, or of an empty one that transformers made; else given.

        Who keeps to the cache it gave, instead of taking that of the output, would give it again, as
        empty as before.
        """
        is_new = given is None or (type(given) is DynamicCache and given.get_seq_length() == 0)
        if worker is None or not is_new:
            return given
        if any(given is cache for cache in self._replaced):
            raise refuse("a cache of transformers' own: the one to go on with is in the output")
        if given is not None:
            self._replaced.append(given)
        cache = self._stack.enter_context(worker.cache())
        cache.is_draft = worker is not self._worker
        return cache


class _DefaultCache:
    """What kind of cache the model's own generation_config names; left out while worker.generate()
    runs, in which the cache is attnd's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_inside = 0
        self._kind: Any = None

    @contextlib.contextmanager
    def left_out(self, config: Any) -> Iterator[None]:
        with self._lock:
            self._n_inside += 1
            if self._n_inside == 1:
                self._kind = getattr(config, "cache_implementation", None)
                config.cache_implementation = None
        try:
            yield
        finally:
            with self._lock:
                self._n_inside -= 1
                if self._n_inside == 0:
                    config.cache_implementation = self._kind


def _option(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """Of generate(), wherever it is said."""
    config = kwargs.get("generation_config")
    given = kwargs.get(name, getattr(config, name, None))
    return getattr(model.generation_config, name, None) if given is None else given


class _Thread(threading.local):
    generating: _Generating | None = None


_thread = _Thread()


class _Hook:
    """A hook of the attached model; models are copied with their hooks, and know of no worker then."""

    def __init__(self, worker: Worker):
        self._worker = weakref.ref(worker)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return _before_forward(self._worker, module, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise refuse(
            "pickling a model that is attached (torch.save, a process of its own): close its worker"
            " first, or save its state_dict()"
        )


def _before_forward(
    worker: weakref.ref[Worker], module: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Refuses what no attention call shows. A hook before the forward of the attached model.

    generate() also runs models whose caches it makes itself: an assistant, and the model once more,
    for guidance. They get one of their worker's.
    """
    weights = kwargs.get("output_attentions")
    if weights or (weights is None and getattr(module.config, "output_attentions", False)):
        raise refuse("output_attentions: the weights are in the daemon, no one makes them")
    if isinstance(kwargs.get("cache"), PagedCache):  # continuous batching
        return args, kwargs
    if kwargs.get("use_cache") is False:
        raise refuse("use_cache=False: attention without an attnd cache")
    n_prompt = getattr(cache_of(kwargs), "n_prompt", 0)
    mask: Any = kwargs.get("attention_mask")
    is_read = kwargs.get("logits_to_keep") == 1 and isinstance(mask, torch.Tensor)
    if is_read and mask.ndim == 2 and mask.shape[1] >= n_prompt:  # not of a chunk of a prompt
        empty = (mask.sum(dim=1) == 0).nonzero().flatten().tolist()
        if empty:
            raise refuse(
                f"row {empty[0]} is all padding: what the model says after padding is no text"
            )
    cache = cache_of(kwargs)
    if _thread.generating is not None and isinstance(module, GenerationMixin):
        cache = _thread.generating.cache_for(worker(), cache)
    if cache is not None:
        kwargs = with_cache(kwargs, cache)
    if isinstance(cache, Cache):
        if cache.known_tokens is not None and module is cache.known_tokens.base:
            kwargs = cache.known_tokens.before(args, kwargs)
        cache.states.begin(module)
    return args, kwargs


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_forward(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    cache = cache_of(kwargs)
    if isinstance(cache, Cache):
        cache.states.end(module)
        if cache.known_tokens is not None and module is cache.known_tokens.base:
            cache.known_tokens.after(kwargs)


_INIT = "init_continuous_batching"
_BATCHING_FROM = (5, 23)  # what it is made of is transformers' own, and was another before


def _refuse_batching(*args: Any, **kwargs: Any) -> Any:
    wanted = ".".join(map(str, _BATCHING_FROM))
    raise refuse(f"continuous batching with transformers {transformers.__version__}: from {wanted} on")


def _set_batching(worker: Worker) -> Any:
    """Gives the model its way into continuous batching; returns it."""
    made: Any = _refuse_batching
    if VERSION >= _BATCHING_FROM:
        from ._engine import init_of

        made = init_of(worker)
    worker.model.__dict__[_INIT] = made
    return made


class Worker(Closing, NotPicklable):
    """A model that runs over pools. Made by attach(); as a context manager it detaches itself.

    pools  one for each geometry of its layers; pool is the first, of most models the only one
    spent  what its steps took; set a new Spent() to begin again
    """

    def __init__(
        self,
        model: Any,
        client: Client,
        pools: Pools,
        owns_client: bool,
        switch: Switch,
        seen: dict[int, Seen],
        lane: bool | None = None,
        graphs: bool = False,
        sharing: Sharing | None = None,
    ):
        self.model = model
        self.client = client
        self.config = switch.config
        self.seen = seen
        self.first_layer = min(seen)
        self.sharing = sharing  # None: prompts are not shared
        self.pools = pools
        self._is_on_gpu = any(p.is_cuda for p in model.parameters())
        self._is_shared = client.url.startswith("shm://")
        self._token_bytes = max(_token_bytes(pool.spec) for pool in pools.all)
        n_at_once = IN_FLIGHT if self._is_on_gpu else 1
        self.max_tokens, self.max_items = _step_limits(client, self._token_bytes, n_at_once)
        self.is_closed = False
        self.spent = Spent()
        self._owns_client = owns_client
        self._switch = switch
        self._cache_class = cache_class(switch.config, Cache)
        self._caches: set[Cache | PagedCache] = set()
        self.layers = Layers(self, lane)
        self.graphs = Graphs(self) if graphs else None
        self._default_cache = _DefaultCache()
        self._staging = Staging()
        self._forgets = _windows_of_caches(switch.config, seen)
        self._batching = _set_batching(self)
        self._hooks, hook = [], _Hook(self)
        for m in model.modules():
            is_text = isinstance(m, PreTrainedModel) and m.config is switch.config
            if is_text or (sharing is not None and m is sharing.base):
                self._hooks.append(m.register_forward_pre_hook(hook, with_kwargs=True))
                self._hooks.append(m.register_forward_hook(_after_forward, with_kwargs=True))

    @property
    def pool(self) -> Pool:
        return self.pools.all[0]

    @property
    def cache_has_states(self) -> bool:
        """Whether the model keeps recurrent or convolution states besides."""
        return bool(States(self.config).layers)

    def check_attached(self) -> None:
        """Refuses if attention would not be attnd's."""
        if self.is_closed:
            raise refuse("the worker of this cache is closed")
        if self._switch.now != NAME:
            raise refuse(
                f"the model is set to the attention {self._switch.now!r}; set_attn_implementation"
                f"({NAME!r}) sets it back"
            )

    def check_window(self, layer: int, n_columns: int) -> None:
        """Refuses what the model's own cache would have forgotten while its masks show it."""
        window = self._forgets.get(layer, n_columns)
        if n_columns > window:
            raise refuse(
                f"layer {layer}: {n_columns} columns, and the model's own cache keeps a sliding_window"
                f" of {window} that its masks do not know: what it says depends on how the prompt is"
                " cut"
            )

    def cache(self) -> Cache:
        """A new, empty cache, to be passed to the model as past_key_values (transformers 5.24: cache);
        close it after use."""
        if self.is_closed:
            raise refuse("this worker is closed")
        cache = self._cache_class(self)
        self._caches.add(cache)
        return cache

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's generate(); the sequences are closed at its end.

        Pass past_key_values=worker.cache() to keep them.
        """
        if self.is_closed:
            raise refuse("this worker is closed")
        if cache_of(kwargs) is not None:
            return self._generate(args, kwargs)
        given = kwargs.get("generation_config")
        kind = kwargs.get("cache_implementation", getattr(given, "cache_implementation", None))
        if kind:
            raise refuse(f"cache_implementation {kind!r}: the cache is attnd's (None)")
        if getattr(given, "cache_implementation", None):  # and None was given besides
            kwargs = {**kwargs, "generation_config": copy.deepcopy(given)}
            kwargs["generation_config"].cache_implementation = None
        try:
            return self._generate(args, kwargs)
        except (SessionGoneError, PoolGoneError, SequenceGoneError):
            if kwargs.get("streamer") is not None:  # some of the text is out
                raise
        self.reopen()
        return self._generate(args, kwargs)

    def _generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = _thread.generating
        with contextlib.ExitStack() as stack:
            cache = cache_of(kwargs)
            if cache is None:
                cache = stack.enter_context(self.cache())
            kwargs = with_cache(kwargs, cache)
            _thread.generating = _Generating(self, stack)
            mask = kwargs.get("attention_mask")
            is_in_chunks = _option(self.model, kwargs, "prefill_chunk_size") is not None
            if isinstance(cache, Cache):
                is_known = is_in_chunks and isinstance(mask, torch.Tensor)
                cache.n_prompt = mask.shape[1] if is_known and mask is not None else 0
            stack.enter_context(self._default_cache.left_out(self.model.generation_config))
            try:
                if self.graphs is not None:
                    stack.enter_context(self.graphs.in_place())
                text = self.model.generate(*args, **kwargs)
            finally:
                _thread.generating = before
            self.layers.check()
            return text

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass, with decode steps as generate() has them: as graphs, if attach()
        was told so. Arguments by name."""
        if self.is_closed:
            raise refuse("this worker is closed")
        with contextlib.nullcontext() if self.graphs is None else self.graphs.in_place():
            return self.model(*args, **kwargs)

    def reopen(self) -> None:
        """Goes on after SessionGoneError or PoolGoneError: the daemon was restarted.

        Makes the pool again, on a new session of the client if need be, and closes the caches, whose
        tokens are gone. generate() does this by itself, but for a cache or a streamer of the user's.
        """
        if self.is_closed:
            raise refuse("this worker is closed")
        for cache in self._caches:
            cache.is_gone = True
        self.layers.close()
        self._close_caches()
        try:
            self.pools.remake()
        except SessionGoneError:
            self.client.reopen()
            self.pools.remake()

    def _close_caches(self) -> None:
        """All of their sequences at once, so that a daemon that is away is waited for once."""
        sequences: list[Sequence] = []
        for cache in list(self._caches):
            cache.is_closed = True
            sequences += cache.forget()
        self._caches.clear()
        close_all(sequences)

    def close(self) -> None:
        """Gives the model its former attention back and closes what belongs to this worker.

        All of it whatever fails on the way; what the daemon has forgotten anyway is no failure.
        """
        if self.is_closed:
            return
        self.is_closed = True
        for hook in self._hooks:
            hook.remove()
        if self.model.__dict__.get(_INIT) is self._batching:
            del self.model.__dict__[_INIT]
        self._switch.back()
        failed: AttndError | None = None
        closing = [self._close_caches, self.layers.close, self.pools.close]
        if self._owns_client:
            closing.append(self.client.close)
        for close in closing:
            try:
                close()
            except AttndError as e:
                failed = failed or e
        if failed is not None:
            raise failed

    # ---- steps

    def step_tokens(self, n_tokens: int) -> int:
        """Tokens of one step, at most, of a pass of n_tokens: from a GPU over sockets half of them, if
        they are many bytes, so that one half is copied while the other is on its way."""
        is_halved = self._is_on_gpu and self.layers.is_refused and not self._is_shared
        if not is_halved or n_tokens * self._token_bytes < HALVES_BYTES:
            return self.max_tokens
        return min(self.max_tokens, (n_tokens + 1) // 2)

    @property
    def absorbs_there(self) -> bool:
        """Whether the daemon projects heads to latents and back."""
        return any(pool.spec.q_nope_dim for pool in self.pools.all)

    def is_absorbed(self, layer: int) -> bool:
        """Whether the layer's latents are in the cache, not the heads made of them."""
        seen = self.seen.get(layer)
        return seen is not None and bool(seen.geometry["V in K"])

    def attend(
        self,
        layer: int,
        plan: Packed,
        qkv: list[torch.Tensor],
        head_dim_v: int,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The steps of packed q, k and v, or of q alone, if the others are in the cache; the output on
        their device. indices: what each query visits."""
        i_pool, pool_layer = self.pools.places[layer]
        q = qkv[0]
        head_dim_v = self.pools.all[i_pool].spec.out_dim or head_dim_v
        if self.is_absorbed(layer):
            qkv = qkv[:2]
        if not self.layers.is_refused:
            here = self.layers.attend(i_pool, pool_layer, plan, qkv, head_dim_v)
            if here is not None:
                return here
        pool = self.pools.all[i_pool]
        out = torch.empty(q.shape[0], q.shape[1], head_dim_v, dtype=q.dtype, device=q.device)
        parts: list[Part] = []
        for chunk in plan.chunks:
            items = chunk.items[i_pool]
            if len(plan.chunks) == 1:  # views take time, too
                parts.append((items, qkv, out))
                continue
            rows = slice(chunk.first, chunk.first + items.n_tokens)
            parts.append((items, [x[rows] for x in qkv], out[rows]))
        if indices is not None:
            self._run_sparse(pool, pool_layer, parts, indices)
            return out
        run = self._run_on_host if q.device.type == "cpu" else self._run_on_device
        run(pool, pool_layer, parts)
        return out

    def _run_sparse(
        self, pool: Pool, layer: int, parts: list[Part], indices: torch.Tensor
    ) -> None:
        begin = 0
        for items, qkv, out in parts:
            visited = indices[begin : begin + items.n_tokens].cpu().contiguous()
            begin += items.n_tokens
            host = [x.cpu().contiguous() for x in qkv]
            result = pool.step(layer, items, *host, out=None, indices=visited)
            out.copy_(result.out)
            self.spent.add(result)

    def _run_on_host(self, pool: Pool, layer: int, parts: list[Part]) -> None:
        for items, qkv, out in parts:
            self.spent.add(pool.step(layer, items, *(x.contiguous() for x in qkv), out=out))

    def _run_on_device(self, pool: Pool, layer: int, parts: list[Part]) -> None:
        for result, copy_ns in self._staging.run(pool, layer, parts):
            self.spent.add(result)
            self.spent.copy_ns += copy_ns
