"""A scheduler and a model of a few layers over the fake of vLLM, which drive attnd-vllm's modules as
vLLM does: the platform's settings, the connector on both sides, the worker, the attention backend.

As vLLM counts: blocks of its own (their numbers mean nothing here), a token from a row whose end is
the last known token, and after failed loads nothing behind the first block that is invalid.
"""

from __future__ import annotations

import importlib
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from . import Attention, Spec, tp


class Request:
    """Also the worker's state of it."""

    def __init__(self, name, prompt, n, **what):
        self.request_id, self.prompt, self.n = name, list(prompt), n
        self.all_token_ids, self.num_prompt_tokens = list(prompt), len(prompt)
        self.num_computed_tokens, self.blocks, self.drafts = 0, [], []
        self.lora_request = what.get("lora")
        self.mm_features = what.get("mm") or ()
        self.cache_salt = what.get("salt")
        self.prompt_embeds = what.get("embeds")
        self.skip_reading_prefix_cache = what.get("skip", False)
        self.kv_transfer_params = what.get("params")
        self.model_salt = what.get("model_salt", 0)  # what K and V depend on besides, in the model
        self.n_cached = 0

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    @property
    def block_ids(self):
        return (self.blocks,)

    @property
    def text(self):
        return self.all_token_ids[len(self.prompt) :]


def config(model, n_blocks, block_size, **more):
    """A VllmConfig, as far as it is looked at."""
    ns = types.SimpleNamespace
    c = ns(
        parallel_config=ns(worker_cls="auto", tensor_parallel_size=1),
        model_config=ns(
            dtype=torch.float32,
            quantization=None,
            runner_type="generate",
            max_model_len=1024,
            use_mla=getattr(model, "is_latent", False),
            hf_text_config=ns(to_dict=lambda: {"layers": model.layers, "_name_or_path": "x"}),
        ),
        cache_config=ns(
            cache_dtype="auto",
            num_gpu_blocks_override=n_blocks,
            block_size=block_size,
            user_specified_block_size=True,
            enable_prefix_caching=True,
        ),
        scheduler_config=ns(
            async_scheduling=True,
            enable_chunked_prefill=True,
            disable_hybrid_kv_cache_manager=False,
            max_num_batched_tokens=64,
            max_num_seqs=6,
        ),
        compilation_config=ns(
            cudagraph_mode=ns(has_full_cudagraphs=lambda: False),
            custom_ops=["all", "+rotary_embedding"],
        ),
        load_config=ns(load_format="auto"),
        speculative_config=None,
        kv_transfer_config=None,
        layers={},
    )
    for path, value in more.items():
        *at, last = path.split("__")
        o = c
        for name in at:
            o = getattr(o, name)
        setattr(o, last, value)
    return c


def named(path):
    """What has a name such as package.module.Class."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class Rank:
    """A worker, with the heads that are its own."""

    def __init__(self, engine, rank, size):
        import attnd_vllm

        tp.rank_in_group, tp.world_size = rank, size
        if rank > 0:  # modules of its own, as it is a process of its own
            for name in [n for n in sys.modules if n.startswith("attnd_vllm.")]:
                del sys.modules[name]
                delattr(attnd_vllm, name.rpartition(".")[2])
        from attnd_vllm import connector, cpu_platform, versions, worker

        versions.gathered = lambda text: [text] * size
        versions.is_any = engine.is_any
        model, self.config = engine.model, c = engine.model, engine.make_config()
        platform = cpu_platform.AttndCpuPlatform
        platform.apply_config_platform_defaults(c)
        platform.check_and_update_config(c)
        selector = types.SimpleNamespace(use_mla=c.model_config.use_mla, use_sparse=False)
        backend = named(platform.get_attn_backend_cls(None, selector))
        self.runner = types.SimpleNamespace(
            requests={},
            input_batch=types.SimpleNamespace(req_ids=[]),
            device=torch.device("cpu"),
            _model_forward=lambda rows, requests, meta: engine.forward(self, rows, requests, meta),
        )
        run = lambda so: engine.run_model(self, so)
        self.worker = named(c.parallel_config.worker_cls)(c, self.runner, model, run)
        self.worker.init_device()
        self.worker.load_model()
        self.q_heads, self.kv_heads = model.q_heads // size, max(1, model.kv_heads // size)
        self.first_q, self.first_kv = rank * self.q_heads, rank * model.kv_heads // size
        for at, name in enumerate(engine.names):
            if c.model_config.use_mla:
                heads = slice(self.first_q, self.first_q + self.q_heads)
                c.layers[name] = model.layer(name, at, backend.get_impl_cls(), heads)
                continue
            impl = backend.get_impl_cls()(self.q_heads, model.dim, model.dim**-0.5, self.kv_heads)
            c.layers[name] = Attention(name, impl)
        spec = backend.customize_spec(Spec(c.cache_config.block_size, torch.float32))
        assert spec.num_head_slots == 1
        self.builder = backend.get_builder_cls()(spec, list(reversed(engine.names)), c, "cpu")
        self.connector = connector.AttndConnector(c, "worker", None)
        self.shared, self.connector_module = worker.shared, connector

    def of(self, qkv):
        """This rank's heads of q, k and v."""
        q, k, v = qkv
        if self.config.model_config.use_mla:  # latents are all heads'
            return q[:, self.first_q : self.first_q + self.q_heads], k, v
        kv = slice(self.first_kv, self.first_kv + self.kv_heads)
        return q[:, self.first_q : self.first_q + self.q_heads], k[:, kv], v[:, kv]


class Engine:
    """model: layers, q_heads, kv_heads, dim, weights(), qkv(ids, layer, salt), token_of(outs); if it is
    latent, layer(name, at, impl_cls, heads), and latents and rotated parts for k and v.

    n_ranks workers have a part of each layer's heads.
    """

    def __init__(self, model, n_blocks, block_size, seed=0, n_ranks=1, **more):
        self.model, self.rng = model, np.random.default_rng(seed)
        self.n_blocks, self.block_size = n_blocks, block_size
        self.make_config = lambda: config(
            model, n_blocks, block_size, parallel_config__tensor_parallel_size=n_ranks, **more
        )
        self.names = [f"model.layers.{i}.attn" for i in range(model.layers)]
        self.ranks = [Rank(self, i, n_ranks) for i in range(n_ranks)]
        first = self.ranks[0]
        self.config, self.shared, self.worker = first.config, first.shared, first.worker
        self.of_scheduler = first.connector_module.AttndConnector(self.config, "scheduler", None)
        self.of_scheduler.set_xfer_handshake_metadata(
            {i: r.connector.get_handshake_metadata() for i, r in enumerate(self.ranks)}
        )
        self.barrier = threading.Barrier(n_ranks, timeout=600)
        self.free = list(range(1, 4 * n_blocks))
        self.waiting, self.running, self.done = [], [], []
        self.finished, self.preempted = set(), []
        self.n_told = {}  # of each request's blocks, to the worker
        self.n_preempted = self.n_recomputed = self.n_rejected = self.n_passes = 0
        self.flags = []  # of the ranks, where they ask together
        self.speculates = False
        self.between = lambda at: None

    def add(self, name, prompt, n, **what):
        self.waiting.append(Request(name, prompt, n, **what))

    # ---- the scheduler

    def _blocks_of(self, n):
        return -(-n // self.block_size)

    def _grow(self, r, n):
        """Blocks for the request's tokens up to n; False: there are none."""
        need = self._blocks_of(n) - len(r.blocks)
        if sum(len(x.blocks) for x in self.running if x is not r) + len(r.blocks) + need > self.n_blocks:
            return False
        for _ in range(need):
            r.blocks.append(self.free.pop())
        return True

    def _give_back(self, r):
        self.free += r.blocks
        r.blocks = []

    def abort(self, name):
        for r in [r for r in self.running + self.waiting if r.request_id == name]:
            self._finish(r)
            self.waiting = [x for x in self.waiting if x is not r]

    def _finish(self, r):
        if r in self.running:
            self.of_scheduler.request_finished(r, r.blocks)
            self.running.remove(r)
            self.finished.add(r.request_id)
            self._give_back(r)

    def _size(self, r, chunk):
        left = r.num_tokens - r.num_computed_tokens
        return min(left, int(self.rng.integers(1, chunk + 1))) if left > 1 else 1

    def step(self, chunk=20):
        sizes = {}
        for r in list(self.running):
            if r not in self.running:
                continue
            n = self._size(r, chunk)
            r.drafts = []
            if self.speculates and r.num_computed_tokens + n == r.num_tokens and self.rng.random() < 0.5:
                r.drafts = [int(t) for t in self.rng.integers(0, self.model.vocabulary, 2)]
            while r in self.running and not self._grow(r, r.num_computed_tokens + n + len(r.drafts)):
                p = self.running.pop()
                sizes.pop(p.request_id, None)
                self._give_back(p)
                p.num_computed_tokens = 0
                self.preempted.append(p.request_id)
                self.n_told[p.request_id] = 0
                self.waiting.insert(0, p)
                self.n_preempted += 1
            if r in self.running:
                sizes[r.request_id] = n
        while self.waiting and not self.preempted and len(self.running) < 6:
            r = self.waiting[0]
            n_hit, is_async = self.of_scheduler.get_num_new_matched_tokens(r, 0)
            assert is_async is False and n_hit < r.num_tokens
            r.num_computed_tokens = n_hit
            n = self._size(r, chunk)
            if not self._grow(r, n_hit + n):
                r.num_computed_tokens = 0
                break
            r.n_cached = max(r.n_cached, n_hit)
            r.drafts = []
            self.of_scheduler.update_state_after_alloc(r, r.blocks, n_hit)
            self.running.append(self.waiting.pop(0))
            sizes[r.request_id] = n
        so = types.SimpleNamespace(
            num_scheduled_tokens={k: v + len(self._named(k).drafts) for k, v in sizes.items()},
            finished_req_ids=self.finished,
            preempted_req_ids=self.preempted,
            total_num_scheduled_tokens=sum(sizes.values()),
            **self._scheduled(),
        )
        so.kv_connector_metadata = self.of_scheduler.build_connector_meta(so)
        self.finished, self.preempted = set(), []
        self.order = [(n, int(k)) for n, k in so.num_scheduled_tokens.items()]
        self.rng.shuffle(self.order)  # the runner has an order of its own
        self.order = [(str(n), int(k)) for n, k in self.order]
        self.failed = set()
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            of_ranks = list(pool.map(lambda r: self._execute(r, so), self.ranks))
        outs = {n: [np.concatenate(o, 1) for o in zip(*(r[n] for r in of_ranks))] for n, _ in self.order}
        invalid = set().union(*(r.connector.get_block_ids_with_load_errors() for r in self.ranks))
        self._take(so, outs, invalid)

    def _execute(self, rank, so):
        try:
            return rank.worker.execute_model(so)
        except BaseException:
            self.barrier.abort()
            raise

    def _scheduled(self):
        """What the worker is told of blocks: all of a new request's or of one that comes back, and what
        others have got since."""
        new, names, blocks, resumed = [], [], [], set()
        for r in self.running:
            if r.request_id not in self.n_told:
                new.append(types.SimpleNamespace(req_id=r.request_id, block_ids=(list(r.blocks),)))
            else:
                n = self.n_told[r.request_id]
                if n == 0:
                    resumed.add(r.request_id)
                names.append(r.request_id)
                blocks.append((r.blocks[n:],) if len(r.blocks) > n else None)
            self.n_told[r.request_id] = len(r.blocks)
        cached = types.SimpleNamespace(req_ids=names, new_block_ids=blocks, resumed_req_ids=resumed)
        return {"scheduled_new_reqs": new, "scheduled_cached_reqs": cached}

    def _named(self, name):
        return next(r for r in self.running if r.request_id == name)

    def _take(self, so, outs, invalid):
        for name, n in so.num_scheduled_tokens.items():
            r = self._named(name)
            bad = [i for i, b in enumerate(r.blocks) if b in invalid]
            if bad:  # vLLM goes back to the first of them
                assert r.num_computed_tokens > 0, "a first chunk can't be failed"
                r.num_computed_tokens = min(r.num_computed_tokens, bad[0] * self.block_size)
                self.n_recomputed += 1
                continue
            is_sampled = r.num_computed_tokens + n - len(r.drafts) == r.num_tokens
            r.num_computed_tokens += n - len(r.drafts)
            if not is_sampled:
                continue
            rows = outs[name]
            for i, draft in enumerate([*r.drafts, None]):
                token = self.model.token_of([o[len(o) - 1 - len(r.drafts) + i] for o in rows])
                r.all_token_ids.append(token)
                if len(r.text) == r.n or token != draft:
                    self.n_rejected += draft is not None
                    break
                r.num_computed_tokens += 1
            if len(r.text) == r.n:
                self._finish(r)
                self.done.append(r)

    # ---- the model

    def run_model(self, rank, so):
        """A rank's part: each layer waits for the other ranks'. What one has failed to compute is of no
        use to any of them from then on."""
        rank.runner.requests = {r.request_id: r for r in self.running}
        rows = self.order
        rank.runner.input_batch.req_ids = [n for n, _ in rows]
        if not rows:
            return {}
        starts = np.cumsum([0, *(n for _, n in rows)])
        requests = [self._named(name) for name, _ in rows]
        lens = [r.num_computed_tokens + n for r, (_, n) in zip(requests, rows)]
        common = types.SimpleNamespace(
            num_reqs=len(rows),
            num_actual_tokens=int(starts[-1]),
            query_start_loc_cpu=torch.from_numpy(starts.astype(np.int64)),
            seq_lens=torch.from_numpy(np.full(len(lens), -1)),
            seq_lens_cpu_upper_bound=torch.from_numpy(np.asarray(lens)),
        )
        return rank.runner._model_forward(rows, requests, rank.builder.build(0, common))

    def is_any(self, flag):
        """Of the ranks, which ask together."""
        self.flags.append(flag)
        self.barrier.wait()
        found = any(self.flags)
        if self.barrier.wait() == 0:
            self.flags.clear()
        self.barrier.wait()
        return found

    def forward(self, rank, rows, requests, meta):
        outs, starts = {name: [] for name, _ in rows}, np.cumsum([0, *(n for _, n in rows)])
        if self.barrier.wait() == 0:
            self.failed.clear()
            self.n_passes += 1
        self.barrier.wait()
        for at, name in enumerate(self.names):
            if rank is self.ranks[0]:
                self.between(at)
            parts = []
            for r, (_, n) in zip(requests, rows):
                ids, pos = r.all_token_ids + r.drafts, r.num_computed_tokens
                salt = 77 if r.request_id in self.failed else r.model_salt
                parts.append([x[pos : pos + n] for x in rank.of(self.model.qkv(ids, at, salt))])
            q, k, v = (torch.from_numpy(np.ascontiguousarray(np.concatenate(x))) for x in zip(*parts))
            out = rank.config.layers[name].forward(q, k, v, meta)
            self.barrier.wait()
            for i, (request, _) in enumerate(rows):
                outs[request].append(np.asarray(out[int(starts[i]) : int(starts[i + 1])]))
                if not outs[request][-1].any():
                    self.failed.add(request)
            self.barrier.wait()
        return outs

    def run(self, each=lambda: None, chunk=20):
        while self.waiting or self.running:
            self.step(chunk)
            each()
        self.step(chunk)  # tells the worker of the last ends

    def close(self):
        self.of_scheduler.shutdown()
        for r in self.ranks:
            r.worker.shutdown()
