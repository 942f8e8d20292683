"""As much of torch as attnd-vllm uses on a CPU, over numpy."""

import types

import numpy as np

float32, float16 = np.dtype("f4"), np.dtype("f2")
bfloat16 = "bfloat16"
int64, int32, int16, uint8 = np.dtype("i8"), np.dtype("i4"), np.dtype("i2"), np.dtype("u1")

def device(name):
    return types.SimpleNamespace(type=name)


class Tensor(np.ndarray):
    device = types.SimpleNamespace(type="cpu")

    def detach(self):
        return self

    def contiguous(self):
        return np.ascontiguousarray(self).view(Tensor)

    def numel(self):
        return self.size

    def element_size(self):
        return self.itemsize

    def to(self, what):
        return self if isinstance(what, types.SimpleNamespace) else self.astype(what)

    def view(self, *what):
        is_shape = bool(what) and isinstance(what[0], (int, tuple))
        return self.reshape(*what) if is_shape else super().view(*what)

    def zero_(self):
        self[...] = 0
        return self

    def unsqueeze(self, axis):
        return np.expand_dims(self, axis).view(Tensor)

    def index_select(self, axis, index):
        return np.take(self, index, axis).view(Tensor)

    def index_copy_(self, axis, index, source):
        self[index] = source
        return self

    def mul_(self, n):
        self *= n
        return self

    def float(self):
        return self.astype(np.float32)

    def diff(self):
        return np.diff(self).view(Tensor)


def tensor(values, dtype=None):
    return np.asarray(values, dtype).view(Tensor)


from_numpy = tensor


def arange(*args, dtype=None, device=None):
    return np.arange(*args, dtype=dtype).view(Tensor)


def cat(tensors, dim=0):
    return np.concatenate(tensors, dim).view(Tensor)


def zeros(*shape, dtype=None):
    return np.zeros(shape, dtype).view(Tensor)


def empty_like(t):
    return np.empty_like(t).view(Tensor)
