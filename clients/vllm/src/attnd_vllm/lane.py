"""How a step's layers get to the daemon: over a lane, planned once per step and then one kernel a layer
on vLLM's own stream, in CUDA graphs as well; or else as steps of the pool, through host memory."""

from __future__ import annotations

import logging
from typing import Any

import attnd
import torch

from attnd.serving.copies import Staging
from attnd.serving.requests import Requests, Step

_log = logging.getLogger("attnd_vllm")

# of each of a lane's regions: larger layers go in pieces, and listen.shm_client may allow less
_MAX_LANE_BYTES, _MIN_LANE_BYTES = 256 << 20, 2 << 20


class Metadata:
    """What the layers of one step need.

    step        of requests.py; None: a trial of vLLM's, without requests
    n_tokens    rows of q, k, v and out that are the step's
    is_planned  a lane has a plan for the step
    is_filled   that plan has all n_tokens; else, as without a lane, those of the step's rows
    is_capture  the layers are recorded, and are those of steps to come
    """

    def __init__(
        self,
        step: Step | None,
        n_tokens: int,
        *,
        is_planned: bool = False,
        is_filled: bool = False,
        is_capture: bool = False,
    ):
        self.step, self.n_tokens = step, n_tokens
        self.is_planned, self.is_filled, self.is_capture = is_planned, is_filled, is_capture
        self._index: tuple[Any, torch.Tensor | None] | None = None  # of a step's rows

    def index(self, device: Any) -> torch.Tensor | None:
        """The places of the tokens that are computed; None: all of them, in order."""
        if self.is_filled or self.step is None:
            return None
        rows = self.step.rows
        if self._index is None or self._index[0] is not rows:  # others than for the layer before
            places = None
            if sum(r.n for r in rows) != self.n_tokens:
                places = torch.cat([torch.arange(r.start, r.start + r.n) for r in rows]).to(device)
            self._index = rows, places
        return self._index[1]


def _at(index: torch.Tensor | None, n: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The rows that are computed, of tensors that may have more than the step's n."""
    return tuple(x[:n] if index is None else x.index_select(0, index) for x in tensors)


class OverHost:
    """Steps of the pool. A GPU's tensors are copied to page-locked memory and back."""

    def __init__(self, requests: Requests):
        self._requests, self._staging = requests, Staging()

    def plan(self, step: Step | None, n_tokens: int, n_padded: int, is_uniform: bool) -> Metadata:
        return Metadata(step, n_tokens)

    def capture(self, n_tokens: int) -> Metadata:
        """Of a step that is recorded."""
        return Metadata(None, n_tokens)

    def attend(self, at: int, m: Metadata, q: Any, k: Any, v: Any, out: torch.Tensor) -> bool:
        """Layer `at` of q, k and v [rows, heads, head_size], of a v of None that is in k; without both the
        layer has appended its own. Fills out for the rows that are computed. False: none are."""
        given = [x for x in (q, k, v) if x is not None]

        def compute(step: Step) -> None:
            index = m.index(q.device)
            qkv = _at(index, m.n_tokens, *given)
            (some,) = _at(index, m.n_tokens, out)
            self._step(at, step, qkv, some)
            if index is not None:
                out.zero_().index_copy_(0, index, some)

        return m.step is not None and m.step.layer(at, compute)

    def _step(self, at: int, step: Step, qkv: Any, out: torch.Tensor) -> None:
        pool = self._requests.pool
        if out.device.type == "cpu":
            pool.step(at, step.items, *(x.contiguous() for x in qkv), out=out)
            return
        for _ in self._staging.run(pool, at, [(step.items, list(qkv), out)]):
            pass

    def check(self) -> None:
        """Raises how a step has failed whose tokens are there."""

    def settle(self) -> None:
        """Returns when no layer is on its way."""

    def close(self) -> None:
        pass


class OverLane:
    """Layers over a lane.

    A graph has its own number of tokens: where a step has fewer, or some of its rows are not
    computed, tokens of sequences that are nobody's take their places.
    """

    def __init__(
        self, requests: Requests, lane: attnd.Lane, n_graph_tokens: int, is_ahead: bool = False
    ):
        """n_graph_tokens: of the largest graph. is_ahead: a step may be planned before it is asked how
        the one before it ended. The lane is this one's."""
        self._requests, self._n_graph_tokens, self._is_ahead = requests, n_graph_tokens, is_ahead
        self._has_captured = self._has_failed = False
        self._take(lane)

    def _take(self, lane: attnd.Lane) -> None:
        from attnd.torch import Attention

        self._lane, self._attention = lane, Attention(lane, self._requests.pool)
        self._fillers: list[attnd.Sequence] = []
        self._n_restarts = self._requests.n_restarts

    def warm(self, device: torch.device) -> None:
        """Two tokens through all layers: what is made at a first call is made before a capture."""
        spec = self._requests.pool.spec
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[spec.q_dtype]
        heads = [spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads]
        qkv = torch.zeros(2, sum(heads), spec.head_dim_k, dtype=dtype, device=device)
        q, k, v = qkv.split(heads, dim=1)
        self._plan(self._requests.pool.items(self._fill(2, 0)))
        for layer in range(spec.num_layers):
            self._attention.enqueue(q, k, v, torch.empty_like(q.contiguous()), layer)
        self.settle()
        self.check()

    def _fill(self, n: int, n_used: int) -> list[tuple[attnd.Sequence, int, int]]:
        """n tokens that are nobody's, where the plan has n_used of these already."""
        while len(self._fillers) < n_used + n:
            self._fillers.append(self._requests.pool.open())
        return [(seq, 0, 1) for seq in self._fillers[n_used : n_used + n]]

    def _items(self, step: Step | None, n_tokens: int) -> list[tuple[attnd.Sequence, int, int]]:
        """A step's rows at their places, and what fills the others."""
        at, n_used = 0, 0
        items: list[tuple[attnd.Sequence, int, int]] = []
        for r in () if step is None else step.rows:
            items += self._fill(r.start - at, n_used)
            n_used += r.start - at
            items.append((self._requests.held[r.request].seq, r.pos, r.n))
            at = r.start + r.n
        return items + self._fill(n_tokens - at, n_used)

    def plan(self, step: Step | None, n_tokens: int, n_padded: int, is_uniform: bool) -> Metadata:
        """n_padded: tokens of the graph, where one is replayed. is_uniform: one may be."""
        is_filled = is_uniform and n_padded <= self._n_graph_tokens
        if step is None:
            if is_filled:
                self._plan(self._requests.pool.items(self._items(None, n_padded)))
            return Metadata(None, n_padded, is_planned=is_filled, is_filled=is_filled)

        def plan_rows(s: Step) -> None:
            if self._n_restarts != self._requests.n_restarts:
                self._reopen()
            if not is_filled or sum(r.n for r in s.rows) == n_padded:
                self._plan(s.items)
                return
            try:
                self._plan(self._requests.pool.items(self._items(s, n_padded)))
            except (attnd.SessionGoneError, attnd.PoolGoneError):
                raise
            except (attnd.NotFoundError, attnd.StaleEpochError):  # perhaps what fills the graph
                self._drop_fillers()
                self._plan(self._requests.pool.items(self._items(s, n_padded)))

        def plan_some(s: Step) -> None:
            try:
                plan_rows(s)
            except attnd.OutOfBlocksError as e:
                e.result = self._without_blocks(s, e.status)
                raise

        last = self._requests.pool.spec.num_layers - 1
        is_planned = step.layer(0, plan_some)
        if is_planned and last > 0:
            step.layer(last, lambda s: None)  # lengths are those after the step from here on
        elif not is_planned and is_filled:
            plan_rows(step)
        return Metadata(
            step,
            n_padded if is_filled else n_tokens,
            is_planned=is_planned or is_filled,
            is_filled=is_filled,
        )

    def _without_blocks(self, step: Step, status: int) -> attnd.Result:
        """Whose row is left out where the pool is full, as a plan fails as a whole: the last that may
        be, of those that take a block. Perhaps there are enough for the others."""
        size, held = self._requests.pool.spec.block_tokens, self._requests.held
        short = [
            r
            for r in step.rows
            if -(-(r.pos + r.n) // size) > -(-held[r.request].n_tokens // size)
        ]
        short = [r for r in short if r.may_fail][-1:] or short
        statuses = tuple(status if r in short else 0 for r in step.rows)
        return attnd.Result(None, None, statuses, 0, 0, 0, 1)

    def _drop_fillers(self) -> None:
        for seq in self._fillers:
            self._requests.end(seq)
        self._fillers = []

    def _plan(self, items: attnd.Items) -> None:
        try:
            self._attention.plan(items, is_restart=self._has_failed)
        except attnd.ConnectionLostError:
            self._reopen()
            self._attention.plan(items)
        except attnd.AttndError as e:
            is_behind = isinstance(e, attnd.OverloadedError)  # the GPU, far behind the host
            if not self._is_earlier_failed() and not is_behind:
                raise
            self.settle()
            self._attention.plan(items, is_restart=self._is_earlier_failed())
        self._has_failed = False

    def _is_earlier_failed(self) -> bool:
        """Whether layers of an earlier plan have failed, which a lane says of each plan until it is
        restarted: it says nothing of the plan's own rows. How a step ended whose tokens matter has been
        asked already, so this one was a trial.

        Raises RuntimeError where they may matter yet.
        """
        try:
            self._lane.check()
        except attnd.AttndError as e:
            if self._is_ahead:
                raise RuntimeError(
                    "attnd-vllm: a layer of an earlier step has failed, and the scheduler has gone on"
                ) from e
            if not self._has_failed:
                _log.warning("attnd: layers of a step whose tokens are nobody's have failed: %s", e)
            self._has_failed = True
            return True
        return False

    def _reopen(self) -> None:
        if self._has_captured:
            raise RuntimeError(
                "attnd-vllm: the daemon has hung up, and CUDA graphs were captured with its lane:"
                " start vLLM again"
            )
        in_bytes, out_bytes = self._lane.in_bytes, self._lane.out_bytes
        self._drop_fillers()
        self.close()
        self._take(self._requests.client.open_lane(in_bytes=in_bytes, out_bytes=out_bytes))

    def capture(self, n_tokens: int) -> Metadata:
        return Metadata(None, n_tokens, is_filled=True, is_capture=True)

    def attend(self, at: int, m: Metadata, q: Any, k: Any, v: Any, out: torch.Tensor) -> bool:
        """As OverHost's, on the current stream, where it does not wait."""
        if m.is_capture and q.is_cuda and torch.cuda.is_current_stream_capturing():
            self._has_captured = True
        elif not m.is_planned:
            return False
        index = m.index(q.device)
        q, k, v = _at(index, m.n_tokens, q, k, v)
        if index is None:
            self._attention.enqueue(q, k, v, out[: m.n_tokens], at)
        else:
            some = torch.empty_like(q)
            self._attention.enqueue(q, k, v, some, at)
            out.zero_().index_copy_(0, index, some)
        return True

    def check(self) -> None:
        """Raises how a step has failed whose tokens are there. Its rows are to be computed again."""
        try:
            self._lane.check()
        except attnd.AttndError:
            self._has_failed = True
            raise

    def settle(self) -> None:
        """Returns when no layer is on its way."""
        if not self._lane.is_host:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Also of what fills the graphs: a session in which a sequence is open outlives its client."""
        if self._lane.is_closed:
            return
        self.settle()
        self._lane.close()
        self._requests.end_all(self._fillers)
        self._fillers = []


Way = OverHost | OverLane


def graph_sizes(config: Any) -> list[int]:
    """Tokens of the graphs that may have attention in them, smallest first."""
    c = config.compilation_config
    if not c.cudagraph_mode.has_full_cudagraphs():
        return []
    return sorted(c.cudagraph_capture_sizes or [])


def open_lane(client: attnd.Client, device: torch.device, config: Any) -> attnd.Lane | None:
    """A lane for the largest step of a vLLM configuration. None: there can't be one, and the log says
    why."""
    if device.type != "cuda":
        return None
    model, parallel = config.model_config, config.parallel_config
    q = model.get_num_attention_heads(parallel)
    kv = 2 * model.get_num_kv_heads(parallel)
    token = config.scheduler_config.max_num_batched_tokens * model.get_head_size()
    in_bytes, out_bytes = (
        min(token * heads * model.dtype.itemsize + 192, _MAX_LANE_BYTES) for heads in (q + kv, q)
    )
    try:
        with torch.cuda.device(device):
            while True:
                try:
                    return client.open_lane(in_bytes=in_bytes, out_bytes=out_bytes)
                except (attnd.InvalidArgumentError, attnd.OverQuotaError):
                    if max(in_bytes, out_bytes) <= _MIN_LANE_BYTES:
                        raise
                    in_bytes, out_bytes = in_bytes // 2, out_bytes // 2  # with more pieces
    except (attnd.UnsupportedError, attnd.ConnectionLostError, attnd.OverQuotaError) as e:
        _log.warning("attnd: no lane, layers go through host memory: %s", e)
        return None
