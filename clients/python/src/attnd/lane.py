"""Lanes: layers without messages, where the daemon computes on this process's GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence as Numbers
from typing import TYPE_CHECKING, Any

from . import _lib
from ._handle import Closing, Guard, NotPicklable, text, timeout_us, whole
from ._step import Item, Items
from .errors import check

if TYPE_CHECKING:
    from .client import Client
    from .pool import Pool, Sequence


class Lane(Closing, NotPicklable):
    """The way of one stream of layers to the daemon. Made by Client.open_lane().

    plan() says once per decode step what its layers will be; each layer is then one enqueue() on a
    CUDA stream, which copies nothing to the host and does not wait. What is enqueued may be captured
    in a CUDA graph. One thread at a time.

    is_host    the daemon computes on the CPU: addresses are the host's, enqueue() does the layer
    in_bytes, out_bytes      of one layer's q, k and v, and of its out and lse; of a piece, where it has
                             more
    in_address, out_address  where they lie: what is written there already is not copied
    """

    def __init__(self, client: Client, handle: ctypes.c_void_p):
        self.client = client
        self._lib = _lib.library()
        self._handle = handle
        self._guard = Guard("lane")
        info = _lib.LaneInfo(ctypes.sizeof(_lib.LaneInfo))
        check(self._lib.attn_lane_info(handle, ctypes.byref(info)))
        self.is_host = bool(info.is_host)
        self.in_bytes: int = info.in_bytes
        self.out_bytes: int = info.out_bytes
        self.in_address: int = info.in_address
        self.out_address: int = info.out_address
        self._step = _lib.LaneStep(ctypes.sizeof(_lib.LaneStep))

    def plan(
        self,
        pool: Pool,
        items: Items | Iterable[Item | tuple[Sequence, int, int]],
        *,
        layers: Numbers[int] | None = None,
        is_append: bool = True,
        is_attend: bool = True,
        lse: bool = False,
        is_restart: bool = False,
        timeout: float | None = None,
    ) -> None:
        """What the layers to come will be, behind those that are planned already.

        layers      in the order in which they will be enqueued; None: all of the pool
        is_restart  layers planned and not enqueued are forgotten, and so is one that failed; no
                    enqueued layer may be unfinished
        Waits for the daemon's answer, not for layers. Raises what step() would, before anything is
        computed; what check() would; OverloadedError: four plans are not finished.

        Layers larger than the lane, or than a step may be, are cut by enqueue(), which then plans each
        piece, waits where four are not finished, needs `out` and can't be captured.
        """
        if not isinstance(items, Items):
            items = Items(items)
        order = range(pool.spec.num_layers) if layers is None else layers
        numbers = (ctypes.c_uint32 * len(order))(*order)
        c = _lib.Plan(
            ctypes.sizeof(_lib.Plan),
            items.n_items,
            ctypes.cast(items.c, ctypes.POINTER(_lib.Item)),
            len(order),
            is_append,
            is_attend,
            lse,
            ctypes.cast(numbers, ctypes.POINTER(ctypes.c_uint32)),
            is_restart,
            0,
            timeout_us(timeout),
        )
        with self._guard, pool._inside():
            check(self._lib.attn_lane_plan(self._handle, pool._handle, ctypes.byref(c)))

    def enqueue(
        self,
        pool: Pool,
        n_tokens: int,
        q: int = 0,
        k: int = 0,
        v: int = 0,
        out: int = 0,
        lse: int = 0,
        stream: int = 0,
        strides: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """The next layer of the plan on a CUDA stream; tensors are addresses, contiguous but for q, k and
        v where strides has the bytes from one token to the next, multiples of 16.

        0 for q: append only; for k and v: attend only; for out: it is read at out_address.
        Raises InvalidArgumentError, DeviceLostError; with is_host what the layer gave.
        """
        c = self._step
        c.n_tokens, c.q, c.k, c.v, c.out, c.lse = n_tokens, q, k, v, out, lse
        c.q_stride, c.k_stride, c.v_stride = strides
        with self._guard:
            check(
                self._lib.attn_lane_enqueue(self._handle, pool._handle, stream, ctypes.byref(c))
            )

    def check(self) -> None:
        """Raises the first failure of the layers that are finished; never waits."""
        with self._guard:
            check(self._lib.attn_lane_check(self._handle))

    @property
    def is_closed(self) -> bool:
        return self._guard.is_closed

    def close(self) -> None:
        """Enqueued layers are to be finished. Safe to call again."""
        if self._guard.is_inherited:  # the parent's, and so is its thread
            self._guard.is_closed = True
        elif self._guard.close(lambda: self._lib.attn_lane_close(self._handle)):
            self.client._lanes.discard(self)


def open_lane(
    client: Client,
    url: str | None,
    in_bytes: int,
    out_bytes: int,
    wait: float | None,
) -> Lane:
    options = _lib.LaneOptions(
        ctypes.sizeof(_lib.LaneOptions),
        0,
        whole("in_bytes", in_bytes, 2**63),
        whole("out_bytes", out_bytes, 2**63),
        timeout_us(wait),
    )
    handle = ctypes.c_void_p()
    with client._guard:
        check(
            client._lib.attn_lane_open(
                client._handle,
                None if url is None else text("url", url),
                ctypes.byref(options),
                ctypes.byref(handle),
            )
        )
    lane = Lane(client, handle)
    client._lanes.add(lane)
    return lane
