"""Attention over KV caches that a daemon keeps: the Python client of attnd.

    import attnd

    with attnd.connect() as client:
        pool = client.create_pool(attnd.PoolSpec("demo", num_layers=1, num_q_heads=8,
                                                 num_kv_heads=2, head_dim_k=64))
        with pool.open() as seq:
            result = pool.step(0, [(seq, 0, 1)], q, k, v)   # numpy arrays, or DLPack tensors

Calls take `timeout` in seconds and raise subclasses of AttndError. attnd.aio is the same for
asyncio, attnd.hf runs HuggingFace models, attnd.torch has a PyTorch operator over a Lane. Nothing but the standard library and libattn.so is
needed to import this.
"""

from ._lib import LibraryNotFound
from ._calls import Calls, Probe
from .client import Client, ClientCounters, ClientInfo, Place, connect, default_url
from .daemon import Daemon
from .errors import (
    AlreadyExistsError,
    AttndError,
    ConnectionLostError,
    DeadlineError,
    DeviceLostError,
    DrainingError,
    FencedError,
    FileError,
    InternalError,
    InvalidArgumentError,
    MovedError,
    NoWeightsError,
    NotFoundError,
    OutOfBlocksError,
    OutOfMemoryError,
    OverloadedError,
    OverQuotaError,
    PoolGoneError,
    ProtocolError,
    SequenceGoneError,
    SessionGoneError,
    StaleEpochError,
    TimedOutError,
    UnauthenticatedError,
    UnsupportedError,
)
from .lane import Lane
from .pool import Item, Items, Pool, Result, Sequence, SequenceFile, Step, sequence_file
from .spec import LayerSpec, PoolSpec

__version__ = "0.2.0"

__all__ = [
    "AlreadyExistsError",
    "AttndError",
    "Calls",
    "Client",
    "ClientCounters",
    "ClientInfo",
    "ConnectionLostError",
    "Daemon",
    "DeadlineError",
    "DeviceLostError",
    "DrainingError",
    "FencedError",
    "FileError",
    "InternalError",
    "InvalidArgumentError",
    "Item",
    "Items",
    "Lane",
    "LayerSpec",
    "LibraryNotFound",
    "MovedError",
    "NoWeightsError",
    "NotFoundError",
    "OutOfBlocksError",
    "OutOfMemoryError",
    "OverQuotaError",
    "OverloadedError",
    "Place",
    "Pool",
    "PoolGoneError",
    "PoolSpec",
    "Probe",
    "ProtocolError",
    "Result",
    "Sequence",
    "SequenceFile",
    "SequenceGoneError",
    "SessionGoneError",
    "StaleEpochError",
    "Step",
    "TimedOutError",
    "UnauthenticatedError",
    "UnsupportedError",
    "connect",
    "default_url",
    "sequence_file",
]
