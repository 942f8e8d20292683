"""Decode steps as CUDA graphs: a pass of one token per row is captured once for each shape of its
arguments and replayed from then on. Of a replay the host does what no kernel can: the plan of the
layers, the books of the cache, the arguments' copies.

A graph knows nothing of what Python decided while it was captured. So it is of no use until a replay
has given, bit for bit, what the same step gave without it, at another position than it was captured
at; and whatever does not look like such a step runs as ever.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils.generic import ModelOutput

from ._cache import Cache
from ._handed import refuse
from ._named import CACHE, with_cache

if TYPE_CHECKING:
    from .._handle import Closing
    from ._rows import Plan
    from ._worker import Worker

_N_WARM = 2  # passes before the capture: what is made at a first call is made by then
_MAX_SHAPES = 8
_COPIED = ("input_ids", "position_ids", "cache_position")


class Recording:
    """What run(cache) does on the GPU, as a graph; replay() gives its outputs, in place."""

    def __init__(self, run: Callable[[Cache], dict[str, torch.Tensor]], cache: Cache):
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = run(cache)

    def replay(self) -> dict[str, torch.Tensor]:
        self._graph.replay()
        return self._outputs

    @staticmethod
    def check(model: Any) -> None:
        devices = {str(p.device) for p in model.parameters()}
        if len(devices) != 1 or not next(iter(devices)).startswith("cuda"):
            raise refuse(
                f"graphs=True, and the model is on {', '.join(sorted(devices))}: not a GPU"
            )


class _Step:
    """A pass of one token per row, of one shape."""

    def __init__(self) -> None:
        self.n_passes = 0
        self.lane: Closing | None = None  # through which it was captured
        self.inputs: dict[str, torch.Tensor] = {}
        self.recording: Recording | None = None
        self.output: Any = ModelOutput  # of what type the model's is
        self.is_verified = False


def _tensors_of(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that a replay takes copies of. Positions are given: a model that made them of the
    cache's length would have that captured."""
    given = {name: kwargs[name] for name in _COPIED if kwargs.get(name) is not None}
    if "position_ids" not in given:
        ids, cache = kwargs["input_ids"], kwargs[CACHE]
        given["position_ids"] = torch.full(
            (1, 1), cache.get_seq_length(), dtype=torch.long, device=ids.device
        )
    return given


def _outputs_of(out: Any) -> dict[str, torch.Tensor]:
    """The tensors of a pass's output, by name; refuses one that has others inside of something."""
    if not isinstance(out, ModelOutput):
        raise refuse(f"graphs=True, and the model returns a {type(out).__name__}")
    for name, value in out.items():
        if not isinstance(value, (torch.Tensor, Cache)):
            raise refuse(f"graphs=True, and the model returns {name}, a {type(value).__name__}")
    return {name: value for name, value in out.items() if isinstance(value, torch.Tensor)}


class Graphs:
    """A worker's captured steps."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self._model = worker.model
        Recording.check(self._model)
        if "position_ids" not in inspect.signature(self._model.forward).parameters:
            raise refuse("graphs=True, and the model's forward takes no position_ids")
        if any(s.sinks is not None for s in worker.seen.values()):
            raise refuse("graphs=True, and layers with sinks, which are compared at each call")
        if worker.cache_has_states:
            raise refuse("graphs=True, and a model with recurrent or convolution states")
        self._device = next(self._model.parameters()).device
        self._steps: dict[Any, _Step] = {}
        self._lock = threading.RLock()
        self._n_inside = 0
        self._eager: Callable[..., Any] = self._model.forward
        self._had: Any = None

    @property
    def n_ready(self) -> int:
        """Captured steps that are replayed."""
        return sum(step.is_verified for step in self._steps.values())

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model's forward is this one's."""
        with self._lock:
            self._n_inside += 1
            if self._n_inside == 1:
                self._had = self._model.__dict__.get("forward")
                self._eager = self._model.forward
                self._model.forward = self._forward
        try:
            yield
        finally:
            with self._lock:
                self._n_inside -= 1
                if self._n_inside == 0 and self._had is not None:
                    self._model.forward = self._had
                elif self._n_inside == 0:
                    del self._model.forward

    def _shape_of(self, kwargs: dict[str, Any]) -> Any:
        """What a step must have in common with the one that was captured; None: it is no such step."""
        cache, ids, mask = (kwargs.get(x) for x in (CACHE, "input_ids", "attention_mask"))
        if (
            torch.is_grad_enabled()
            or torch.is_autocast_enabled()
            or not isinstance(cache, Cache)
            or cache.worker is not self._worker
            or not isinstance(ids, torch.Tensor)
            or ids.shape != (len(cache.rows), 1)
            or not (mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2))
            or not cache.is_even
            or not self._worker.layers.is_used
        ):
            return None
        tensors = _tensors_of(kwargs)
        if any(
            not isinstance(x, torch.Tensor) or x.device != self._device for x in tensors.values()
        ):
            return None
        rest = {
            name: value
            for name, value in kwargs.items()
            if name not in (*_COPIED, CACHE, "attention_mask") and value is not None
        }
        if not all(isinstance(value, (bool, int, str)) for value in rest.values()):
            return None
        shapes = tuple((name, x.shape, x.dtype) for name, x in tensors.items())
        return shapes, tuple(sorted(rest.items())), any(cache.pads)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        shape = None if args else self._shape_of(kwargs)
        if shape is None:
            return self._eager(*args, **kwargs)
        with self._lock:
            if shape not in self._steps and len(self._steps) == _MAX_SHAPES:
                del self._steps[next(iter(self._steps))]
            step = self._steps.setdefault(shape, _Step())
            if step.recording is not None and step.lane is not self._worker.layers.lane:
                step = self._steps[shape] = _Step()
            if step.is_verified:
                return self._replay(step, kwargs)
            return self._approach(step, kwargs)

    def _approach(self, step: _Step, kwargs: dict[str, Any]) -> Any:
        """A step without a graph; before or after it what brings its graph nearer."""
        cache = kwargs[CACHE]
        step.n_passes += 1
        if step.recording is None:
            out = self._eager(**kwargs)
            if step.n_passes >= _N_WARM and self._worker.layers.is_used:
                self._record(step, kwargs)
            return out
        plan = cache.plan_token(kwargs.get("attention_mask"), self._device)
        tensors = _tensors_of(kwargs)
        out = self._eager(**kwargs)
        expected = _outputs_of(out)
        given = self._run(step, plan, tensors)
        if given is None:
            return out
        for name, x in given.items():
            if not torch.equal(x, expected[name]):
                cache.crop(-1)  # what the replay stored may be as wrong
                raise refuse(
                    f"graphs=True, and a replayed step has other {name} than the step itself"
                )
        step.is_verified = True
        return out

    def _record(self, step: _Step, kwargs: dict[str, Any]) -> None:
        step.inputs = {name: x.clone() for name, x in _tensors_of(kwargs).items()}
        step.lane = self._worker.layers.lane
        rest = {**kwargs, **step.inputs, "attention_mask": None}
        cache = rest.pop(CACHE)

        def run(cache: Cache) -> dict[str, torch.Tensor]:
            out = self._eager(**with_cache(rest, cache))
            self._worker.layers.check_recorded()
            step.output = type(out)
            return _outputs_of(out)

        with cache.recorded(), self._worker.layers.recorded():
            try:
                step.recording = Recording(run, cache)
            except RuntimeError as e:
                raise refuse(f"graphs=True, and a step of this model can't be captured: {e}") from e

    def _run(
        self, step: _Step, plan: Plan, tensors: dict[str, Any]
    ) -> dict[str, torch.Tensor] | None:
        """None: the lane is not there any more."""
        assert step.recording is not None
        for name, x in tensors.items():
            step.inputs[name].copy_(x)
        return self._worker.layers.replay(plan, step.recording.replay)  # type: ignore[no-any-return]

    def _replay(self, step: _Step, kwargs: dict[str, Any]) -> Any:
        cache = kwargs[CACHE]
        plan = cache.plan_token(kwargs.get("attention_mask"), self._device)
        out = self._run(step, plan, _tensors_of(kwargs))
        if out is None:
            return self._eager(**kwargs)
        cache.has_passed(plan)
        return step.output(**with_cache({name: x.clone() for name, x in out.items()}, cache))
