"""What Cache.update() hands to a layer instead of keys and values.

The update() of other caches returns all cached keys; attnd's are in the daemon, only the new ones are
here. An attention that took those for all would compute garbage without an error: the model may have
been set to another attention, or be another model. So a layer gets Handed, which is no tensor. attnd's
attention takes it apart; whatever else touches it raises UnsupportedError.

What some models do between the two to each token by itself goes through: shapes, and the projections
that expand latents (MLA).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedError

if TYPE_CHECKING:
    from ._cache import Cache
    from ._calls import Probe
    from ._paged import PagedCache

_FACTS = frozenset(("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "itemsize"))
_METHODS = frozenset(
    "size dim view reshape transpose permute contiguous expand split chunk unsqueeze squeeze flatten"
    " unflatten repeat to type_as new_empty copy_ float half bfloat16".split()
)
# Their first argument may be Handed, the others (weights) not.
_LAYERS = frozenset((torch.nn.functional.linear, torch.nn.functional.layer_norm))
_JOINS = frozenset((torch.cat, torch.concat, torch.split, torch.chunk))


def refuse(what: str) -> UnsupportedError:
    return UnsupportedError(f"attnd.hf: {what}")


class NoSuchAttribute(UnsupportedError, AttributeError):
    """As UnsupportedError; hasattr() and getattr() with a default see that there is none."""

    @property
    def name(self) -> str:
        return super().name

    @name.setter
    def name(self, name: str) -> None:
        """Python notes the attribute's name in every AttributeError; the message has it."""


def refuse_attribute(what: str) -> NoSuchAttribute:
    return NoSuchAttribute(f"attnd.hf: {what}")


def _name_of(func: Any) -> str:
    return getattr(func, "__name__", None) or str(func)


def _refuse_use(func: Any) -> UnsupportedError:
    return refuse(
        f"{_name_of(func)}() of keys or values that an attnd cache handed on: only attnd's attention"
        " can use them, and the model's is another (not attached, or a computation of its own)"
    )


class Update:
    """One update() of one layer of a cache.

    given  the keys and values as update() got them; of latent attention latents and rotated parts
    """

    __slots__ = ("cache", "layer", "given", "is_stored")

    def __init__(self, cache: Cache | PagedCache | Probe, layer: int, keys: Any, values: Any):
        self.cache = cache
        self.layer = layer
        self.given = keys, values
        self.is_stored = False


class Handed:
    """The new keys, or values, of an update on their way to attnd's attention.

    is_whole  as update() got them; else the model has made something of them
    """

    __slots__ = ("tensor", "update", "is_whole")

    def __init__(self, tensor: torch.Tensor, update: Update, is_whole: bool = False):
        self.tensor = tensor
        self.update = update
        self.is_whole = is_whole

    def __getattr__(self, name: str) -> Any:
        if name in _FACTS:
            return getattr(self.tensor, name)
        if name in _METHODS:
            method = getattr(torch.Tensor, name)
            return lambda *args, **kwargs: self._call(method, (self, *args), kwargs)
        raise refuse_attribute(
            f"{name} of keys or values that an attnd cache handed on: only attnd's attention can use them"
        )

    def __getitem__(self, index: Any) -> Any:
        return self._call(torch.Tensor.__getitem__, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(value, Handed):
            raise _refuse_use(torch.Tensor.__setitem__)
        self._call(torch.Tensor.__setitem__, (self, index, value), {})

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """func on the tensors themselves; what it gives is handed on as well."""

        def bare(x: Any) -> Any:
            if isinstance(x, Handed):
                if x.update is not self.update:
                    raise _refuse_use(func)
                return x.tensor
            if isinstance(x, (tuple, list)) and any(isinstance(y, Handed) for y in x):
                if not all(isinstance(y, Handed) for y in x):
                    raise _refuse_use(func)
                return type(x)(bare(y) for y in x)
            return x

        def handed(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return self if x is self.tensor else Handed(x, self.update)
            if isinstance(x, (tuple, list)) and any(isinstance(y, torch.Tensor) for y in x):
                return type(x)(handed(y) for y in x)
            return x

        return handed(func(*map(bare, args), **{k: bare(v) for k, v in kwargs.items()}))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and func in _LAYERS and isinstance(args[0], Handed):
            if not any(isinstance(x, Handed) for x in (*args[1:], *kwargs.values())):
                return args[0]._call(func, args, kwargs)
        if args and func in _JOINS:
            first = args[0][0] if isinstance(args[0], (tuple, list)) else args[0]
            if isinstance(first, Handed):
                return first._call(func, args, kwargs)
        raise _refuse_use(func)

    def __repr__(self) -> str:
        return f"<attnd.hf keys or values of layer {self.update.layer}, {tuple(self.tensor.shape)}>"


def _refuse_operator(name: str) -> Any:
    def refused(self: Any, *args: Any) -> Any:
        raise refuse(
            f"{name} on keys or values that an attnd cache handed on: only attnd's attention can use them"
        )

    return refused


for _name in (
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv matmul rmatmul pow rpow neg abs"
    " lt le gt ge array float int bool iter len".split()
):
    setattr(Handed, f"__{_name}__", _refuse_operator(f"__{_name}__"))


def hand(
    cache: Cache | PagedCache | Probe, layer: int, keys: Any, values: Any
) -> tuple[Handed, Handed]:
    update = Update(cache, layer, keys, values)
    return Handed(keys, update, True), Handed(values, update, True)
