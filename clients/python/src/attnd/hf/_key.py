"""The key of shared prefixes: what computes a model's keys and values besides the tokens, as a number.

That is the model as it stands: the classes of its modules, whatever their attributes hold (scales, which
adapters are active or merged, configs), and the bytes of all tensors, buffers that are not saved included.
It is looked at again with every pass, since all of this may change while the model is attached. What may
compute anything is refused: hooks, replaced methods and functions, classes of other packages.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import sys
import threading
import types
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as _torch_modules
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import UnsupportedError
from ._known import (
    check_class,
    check_module,
    classes_of,
    is_known_function,
    is_known_module,
    is_native,
    named,
    refuse_sharing,
    unwrapped,
    versions,
)
from ._rope import is_per_pass, of_all_passes
from ._sums import glance_at, sum_of

_PLAIN: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, range, slice, type(...))
_PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
# Of torch's modules: what is looked at by itself, or has no part in a forward pass.
_OF_TORCH = frozenset(torch.nn.Module().__dict__)
# What has no part in keys and values: how text is made of logits, names, whose attention there is.
_NO_PART = frozenset(
    "forward generation_config warnings_issued name_or_path _name_or_path _commit_hash architectures"
    " transformers_version hf_device_map _attn_implementation_internal prepare_inputs_for_generation"
    " init_continuous_batching base_model_name_or_path revision inference_mode auto_mapping"
    " _output_capturing_hooks_installed _hf_peft_config_loaded _compiled_call".split()
)
# Modules whose functions may have been replaced.
_CHECKED = ("transformers.", "peft.", "torch.nn.functional")
_OURS = ("attnd.hf._worker", "transformers.utils.output_capturing")  # hooks that change nothing


def base_of(model: Any) -> Any:
    """The model that is given the token ids, inside of what torch.compile() or PEFT make of it."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(type(model), "get_base_model") else model


def _origin(function: Any) -> str | None:
    return getattr(unwrapped(function), "__module__", None)


def _numerics() -> tuple[Any, ...]:
    """What decides about roundings."""
    return (
        torch.get_float32_matmul_precision(),
        *(
            (d, torch.get_autocast_dtype(d))
            for d in ("cpu", "cuda")
            if torch.is_autocast_enabled(d)
        ),
    )


class _Stamp(NamedTuple):
    """A tensor as it was; its bytes may have changed through .data all the same."""

    ref: weakref.ref[torch.Tensor]
    address: int
    version: int

    @classmethod
    def of(cls, t: torch.Tensor) -> _Stamp:
        return cls(weakref.ref(t), t.data_ptr(), 0 if t.is_inference() else t._version)

    def is_now(self) -> bool:
        t = self.ref()
        return t is not None and self[1:] == (t.data_ptr(), 0 if t.is_inference() else t._version)


class _Walk:
    """A model as it is: all that is plain, as text; its tensors; and what shows that it is still so."""

    def __init__(self, model: Any):
        self.text: list[str] = versions()
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}  # by id
        self._modules: dict[int, Any] = {}
        self._copies: list[tuple[Any, Any]] = []
        self._of_passes: list[tuple[Any, Any]] = []
        self._tensor_dicts: list[Any] = []
        self._numbers: dict[int, int] = {}  # of objects that were met, by id
        self._met: list[Any] = []
        self._top = model
        self._meet_module("", model)
        classes = classes_of([*self._modules.values(), *self._met])
        for cls in classes:
            self._look_at_class(cls)
        if self._of_passes:
            self._meet("rope", ROPE_INIT_FUNCTIONS)
        for name in sorted({"torch.nn.functional", *(cls.__module__ for cls in classes)}):
            module = sys.modules.get(name)
            if module is not None and name.startswith(_CHECKED):
                check_module(module)
                self._copies.append((vars(module), dict(vars(module))))
        self.text.append(repr(_numerics()))
        self._numerics = _numerics()
        self._hooks = self._hooks_now()
        self._stamps = [_Stamp.of(t) for _, t in self.tensors.values()]
        self._ids = self._ids_now()

    # ---- whether it is still so

    def is_now(self) -> bool:
        try:
            return bool(
                self._hooks == self._hooks_now()
                and self._ids == self._ids_now()
                and all(stamp.is_now() for stamp in self._stamps)
                and all(now == before for now, before in self._copies)
                and all(of_all_passes(m.__dict__) == before for m, before in self._of_passes)
                and self._numerics == _numerics()
                and not _modes()
            )
        except (RuntimeError, ValueError):  # of a tensor or an array that is another
            return False

    def _hooks_now(self) -> list[Any]:
        dicts = [_torch_modules._global_forward_hooks, _torch_modules._global_forward_pre_hooks]
        for m in self._modules.values():
            dicts += m._forward_hooks, m._forward_pre_hooks
        return [key for d in dicts for key in d]

    def _ids_now(self) -> list[int]:
        return [
            id(x)
            for dicts in (self._tensor_dicts, (m._modules for m in self._modules.values()))
            for d in dicts
            for x in d.values()
        ]

    # ---- modules

    def _meet_module(self, path: str, m: Any) -> None:
        self.text.append(f"{path}: module {self._number(m)}")
        if id(m) in self._modules:
            return
        self._modules[id(m)] = m
        name = path or type(m).__name__
        if parametrize.is_parametrized(m):
            raise refuse_sharing(f"{name} has parametrizations: what they make is not known")
        if m.training:
            raise refuse_sharing(f"{name} is in training mode: call model.eval()")
        self._check_hooks(name, m)
        self._check_forward(name, m)
        self.text.append(f"{type(m).__module__}.{type(m).__qualname__}")
        state = {**m.__dict__, **m._parameters, **m._buffers}
        if is_per_pass(m):
            state = of_all_passes(state)
            self._of_passes.append((m, of_all_passes(m.__dict__)))
        else:
            self._copies.append((m.__dict__, dict(m.__dict__)))
            self._tensor_dicts += m._parameters, m._buffers
        for attribute in sorted(state.keys() - _OF_TORCH - _NO_PART):
            self._meet(f"{name}.{attribute}", state[attribute])
        for child_name, child in m._modules.items():
            if child is not None:
                self._meet_module(f"{path}.{child_name}" if path else child_name, child)

    def _check_hooks(self, name: str, m: Any) -> None:
        hooks = [*m._forward_pre_hooks.values()]
        if m is not self._top:  # behind all of it, a hook sees the logits alone
            hooks += m._forward_hooks.values()
        for hook in hooks:
            if _origin(hook) not in _OURS:
                raise refuse_sharing(
                    f"{name} has a hook, {named(hook)}: what it makes of hidden states is not known"
                )

    def _check_forward(self, name: str, m: Any) -> None:
        """A forward of the module's own: its class's, maybe compiled, or the graphs of attach()."""
        forward = m.__dict__.get("forward")
        if forward is None or _origin(forward) == "attnd.hf._graphs":
            return
        method = getattr(forward, "_torchdynamo_orig_callable", forward)
        of, function = getattr(method, "__self__", None), getattr(method, "__func__", None)
        if of is not m or function is not getattr(type(m), "forward", None):
            raise refuse_sharing(f"{name}.forward was replaced by {named(forward)}")

    # ---- what attributes hold

    def _number(self, x: Any) -> int:
        self._met.append(x)
        return self._numbers.setdefault(id(x), len(self._numbers))

    def _meet(self, path: str, x: Any) -> None:
        self.text.append(path)
        if isinstance(x, _PLAIN) and not isinstance(x, enum.Enum):
            self.text.append(repr(x))
        elif isinstance(x, torch.nn.Module):
            self._meet_module(path, x)
        elif id(x) in self._numbers:
            self.text.append(f"as {self._numbers[id(x)]}")
        elif isinstance(x, torch.Tensor):
            self._number(x)
            self._meet_tensor(path, x)
        else:
            self._number(x)
            self._meet_object(path, x)

    def _meet_tensor(self, path: str, t: torch.Tensor) -> None:
        self.text.append(f"{t.dtype} {tuple(t.shape)}")
        if is_traceable_wrapper_subclass(t):
            names, context = t.__tensor_flatten__()
            self._meet(f"{path} flattened", context)
            for name in names:
                self._meet(f"{path}.{name}", getattr(t, name))
            return
        is_plain = type(t).__module__ in ("torch", "torch.nn.parameter")
        if not is_plain or t.layout != torch.strided or t.is_quantized:
            raise refuse_sharing(f"{path} is a {type(t).__name__} of {t.dtype}, {t.layout}")
        if t.is_meta:
            raise refuse_sharing(f"{path} is not there (on the meta device: offloaded)")
        self.tensors[id(t)] = path, t

    def _meet_object(self, path: str, x: Any) -> None:
        if isinstance(x, dict):
            self._copies.append((x, dict(x)))
            for key in sorted(x, key=str):
                self._meet(f"{path} key", key)
                self._meet(f"{path}[{key!r}]", x[key])
        elif isinstance(x, (list, tuple, deque)):
            self._copies.append((x, type(x)(x) if type(x) in (list, tuple, deque) else x))
            for i, item in enumerate(x):
                self._meet(f"{path}[{i}]", item)
        elif isinstance(x, (set, frozenset)):
            self._copies.append((x, set(x)))
            for i, item in enumerate(sorted(x, key=str)):
                self._meet(f"{path}[{i}]", item)
        elif isinstance(x, enum.Enum):
            self.text.append(str(x))
        elif not self._meet_code(path, x):
            self._meet_state(path, x)

    def _meet_code(self, path: str, x: Any) -> bool:
        """Functions and classes, by their names."""
        if isinstance(x, types.FunctionType):
            if not is_known_function(x):
                raise refuse_sharing(f"{path} is {named(x)}: what it computes is not known")
            self.text.append(f"{x.__module__}.{x.__qualname__} {x.__code__.co_firstlineno}")
            for cell in x.__closure__ or ():
                self._meet(f"{path} closure", cell.cell_contents)
        elif isinstance(x, types.MethodType):
            self._meet(f"{path} self", x.__self__)
            self._meet(f"{path} function", x.__func__)
        elif isinstance(x, functools.partial):
            for part in (x.func, list(x.args), x.keywords):
                self._meet(f"{path} partial", part)
        elif isinstance(x, types.BuiltinFunctionType) and is_known_module(_origin(x) or "torch"):
            self.text.append(f"{x.__module__}.{x.__qualname__}")
        elif isinstance(x, (type, types.ModuleType)):
            name = x.__name__ if isinstance(x, types.ModuleType) else x.__module__
            if not is_known_module(name):
                raise refuse_sharing(f"{path} is {named(x)}: what it computes is not known")
            self.text.append(f"{name}.{x.__name__}")
        else:
            return False
        return True

    def _meet_state(self, path: str, x: Any) -> None:
        """Of any other object."""
        cls = type(x)
        if not hasattr(x, "__dict__") or not is_known_module(cls.__module__) or is_native(cls):
            raise refuse_sharing(f"{path} is a {cls.__module__}.{cls.__qualname__}: not known")
        self.text.append(f"{cls.__module__}.{cls.__qualname__}")
        state = vars(x)
        self._copies.append((state, dict(state)))
        for name in sorted(state.keys() - _NO_PART):
            self._meet(f"{path}.{name}", state[name])

    def _look_at_class(self, cls: type) -> None:
        if cls.__module__ in ("builtins", "collections"):
            return
        check_class(cls)
        self._copies.append((vars(cls), dict(vars(cls))))
        if cls.__module__.startswith("torch."):
            return
        self.text.extend(
            f"{cls.__qualname__}.{name} {value!r}"
            for name, value in sorted(vars(cls).items())
            if isinstance(value, (bool, int, float, str)) and not name.startswith("_")
        )


def _modes() -> list[Any]:
    """What sees each of torch's operations, and may do another."""
    stack: Any = _get_current_function_mode_stack
    modes = [m for m in stack() if not isinstance(m, DeviceContext)]
    return [*modes, *_get_current_dispatch_mode_stack()]


class Taken:
    """A key as it was at some time."""

    def __init__(self, number: int, generation: int):
        self.number = number
        self.generation = generation


class ModelKey:
    """A model's key, which changes with the model.

    take() raises UnsupportedError for a model whose keys and values may be anything.
    """

    def __init__(self, model: Any):
        self.base = base_of(model)
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise refuse_sharing("a tuned prompt is part of the text: it is no token ids")
        self._lock = threading.RLock()
        self._walk: _Walk | None = None
        self._generation = 0
        self._sums: dict[int, tuple[_Stamp, int]] = {}
        self._glance: list[int] = []
        self._number = 0

    def take(self, is_thorough: bool = True) -> Taken:
        """As the model is now; thorough: also where weights were written through .data."""
        with self._lock:
            self._look()
            if is_thorough and self._walk is not None and self._glance != self._glance_now():
                self._sums.clear()
                self._begin_anew()
            return Taken(self._number_now(), self._generation)

    def is_still(self, taken: Taken) -> bool:
        """Whether keys and values are computed as then; does not see writes through .data."""
        with self._lock:
            self._look()
            if taken.generation != self._generation:
                try:
                    if self._number_now() != taken.number:
                        return False
                except UnsupportedError:
                    return False
                taken.generation = self._generation
            return True

    def _look(self) -> None:
        if self._walk is not None and not self._walk.is_now():
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._walk = None
        self._generation += 1

    def _glance_now(self) -> list[int]:
        assert self._walk is not None
        return glance_at(t for _, t in self._walk.tensors.values())

    def _number_now(self) -> int:
        if self._walk is None:
            if modes := _modes():
                raise refuse_sharing(
                    f"{named(modes[0])} sees each operation: what it does is not known"
                )
            for hooks in (
                _torch_modules._global_forward_hooks,
                _torch_modules._global_forward_pre_hooks,
            ):
                for hook in hooks.values():
                    raise refuse_sharing(
                        f"a hook of all modules, {named(hook)}: what it does is not known"
                    )
            walk = _Walk(self.base)
            self._glance = glance_at(t for _, t in walk.tensors.values())
            self._number = self._digest(walk)
            self._walk = walk
        return self._number

    def _digest(self, walk: _Walk) -> int:
        digest = hashlib.sha256("\n".join(walk.text).encode())
        sums: dict[int, tuple[_Stamp, int]] = {}
        for i, (_, t) in walk.tensors.items():
            have = self._sums.get(i)
            known = have is not None and have[0].ref() is t and have[0].is_now()
            sums[i] = have if known and have is not None else (_Stamp.of(t), sum_of(t))
            digest.update(sums[i][1].to_bytes(8, "little", signed=True))
        self._sums = sums
        return int.from_bytes(digest.digest()[:8], "little") or 1
