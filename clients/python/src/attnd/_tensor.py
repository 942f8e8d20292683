"""Addresses of the caller's arrays, without copying them: numpy arrays and any DLPack tensor.

numpy has no bf16, so a pool of bf16 takes uint16 arrays (the upper halves of float32), arrays of
ml_dtypes.bfloat16, and torch.bfloat16 tensors, whose DLPack capsule is read here directly.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import (
    POINTER,
    Structure,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint64,
    c_void_p,
    py_object,
)
from typing import Any

F32, F16, BF16, FP8_E4M3, INT8, NVFP4, MXFP4 = 1, 2, 3, 4, 5, 6, 7
DTYPES = {
    "f32": F32,
    "f16": F16,
    "bf16": BF16,
    "fp8_e4m3": FP8_E4M3,
    "int8": INT8,
    "nvfp4": NVFP4,
    "mxfp4": MXFP4,
}
NAMES = {code: name for name, code in DTYPES.items()}
I32 = 100  # of indices, no dtype of a pool
_FLOAT32, _FLOAT16, _UINT16, _INT32 = 11, 23, 4, 5  # numpy's type numbers
_NUMPY = {F32: (_FLOAT32,), F16: (_FLOAT16,), BF16: (_UINT16,), I32: (_INT32,)}
_NUMPY_NAMES = {F32: "float32", F16: "float16", BF16: "uint16"}
_TORCH_NAMES = {F32: "float32", F16: "float16", BF16: "bfloat16", I32: "int32"}

# DLPack: (code, bits), code 0 int, 1 uint, 2 float, 4 bfloat
_DLPACK = {F32: ((2, 32),), F16: ((2, 16),), BF16: ((4, 16), (1, 16)), I32: ((0, 32),)}
_DLPACK_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_HOST = (1, 3, 11)  # plain memory, pinned by CUDA, pinned by ROCm
_DEVICES = {
    2: "cuda",
    4: "opencl",
    7: "vulkan",
    8: "metal",
    10: "rocm",
    13: "cuda managed",
    14: "oneapi",
}


class _DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = c_void_p
_capsule_pointer.argtypes = [py_object, ctypes.c_char_p]


def _is_contiguous(shape: tuple[int, ...], strides: Any) -> bool:
    """strides in elements; those of dimensions of length 1 mean nothing."""
    expected = 1
    for i in range(len(shape) - 1, -1, -1):
        if shape[i] != 1 and strides[i] != expected:
            return False
        expected *= shape[i]
    return True


def _check_shape(name: str, shape: tuple[int, ...], want: tuple[int, ...]) -> None:
    if shape != want:
        raise ValueError(f"{name} has shape {list(shape)}, expected {list(want)}")


def _wanted(dtype: int) -> str:
    return "expected int32" if dtype == I32 else f"the pool's arrays are {NAMES[dtype]}"


def _from_numpy(a: Any, name: str, dtype: int, shape: tuple[int, ...], is_output: bool) -> int:
    kind = a.dtype
    is_good = kind.num in _NUMPY[dtype] and kind.isnative
    if not is_good and not (dtype == BF16 and kind.name == "bfloat16"):
        raise TypeError(f"{name} has dtype {kind}, {_wanted(dtype)}")
    if a.shape != shape:
        _check_shape(name, a.shape, shape)
    flags = a.flags
    if not flags.c_contiguous:
        raise ValueError(f"{name} is not C-contiguous: pass numpy.ascontiguousarray({name})")
    if is_output and not flags.writeable:
        raise ValueError(f"{name} is read-only")
    address: int = a.__array_interface__["data"][0]
    return address


def _from_dlpack(t: Any, name: str, dtype: int, shape: tuple[int, ...]) -> tuple[int, Any]:
    device, index = t.__dlpack_device__()
    if int(device) not in _HOST:
        where = _DEVICES.get(int(device), f"device type {int(device)}")
        raise TypeError(
            f"{name} is on {where}:{index}; attnd takes tensors in host memory: copy it explicitly"
        )
    capsule = t.__dlpack__()
    d = ctypes.cast(_capsule_pointer(capsule, b"dltensor"), POINTER(_DLTensor)).contents
    if (d.code, d.bits) not in _DLPACK[dtype] or d.lanes != 1:
        kind = f"{_DLPACK_CODES.get(d.code, d.code)}{d.bits}"
        raise TypeError(f"{name} has dtype {kind}, {_wanted(dtype)}")
    has = tuple(d.shape[: d.ndim])
    if has != shape:
        _check_shape(name, has, shape)
    if d.strides and not _is_contiguous(shape, d.strides):
        raise ValueError(f"{name} is not contiguous: pass {name}.contiguous()")
    return d.data + d.byte_offset, capsule


def _is_plain(a: Any, torch: Any, dtype: int, shape: tuple[int, ...]) -> bool:
    """Whether nothing is to be said of a torch tensor; a capsule, which tells what, takes longer."""
    return (
        a.dtype is getattr(torch, _TORCH_NAMES[dtype])
        and a.shape == shape
        and a.is_cpu
        and a.is_contiguous()
        and not (a.requires_grad or a.is_neg())
    )


def address_of(
    a: Any, name: str, dtype: int, shape: tuple[int, ...], is_output: bool = False
) -> tuple[int, Any]:
    """(address, what keeps it alive) of an array in host memory.

    Raises TypeError for a wrong dtype, a tensor on a device, or something that is no tensor;
    ValueError for a wrong shape, gaps between elements, or an output that is read-only.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(a, numpy.ndarray):
        return _from_numpy(a, name, dtype, shape, is_output), a
    torch = sys.modules.get("torch")
    if torch is not None and type(a) is torch.Tensor and _is_plain(a, torch, dtype, shape):
        return a.data_ptr(), a
    if hasattr(a, "__dlpack__"):
        address, capsule = _from_dlpack(a, name, dtype, shape)
        return address, (a, capsule)
    raise TypeError(f"{name} is a {type(a).__name__}, expected a numpy array or a DLPack tensor")


def empty(like: Any, shape: tuple[int, ...], dtype: int) -> Any:
    """A new array of `like`'s library: torch for torch tensors, else numpy (uint16 for bf16)."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=getattr(torch, _TORCH_NAMES[dtype]))
    import numpy

    if dtype == BF16 and isinstance(like, numpy.ndarray):
        return numpy.empty(shape, like.dtype)  # uint16 or ml_dtypes.bfloat16, as it came
    return numpy.empty(shape, _NUMPY_NAMES[dtype])
