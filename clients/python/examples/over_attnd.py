"""The attention object that lets llama.Llama run over attnd, and what the examples share."""

from __future__ import annotations

import argparse
from typing import Sequence

import llama
import numpy as np

import attnd

PROMPTS = [
    b"def read(self, ",
    b"class Client:\n    def ",
    b"import os\n",
    b"The default value ",
    b"    for line in ",
    b"# This module ",
    b"try:\n    import ",
    b"def __init__(self, path",
]


def arguments(description: str, n_new: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--url",
        default=attnd.default_url(),
        help="where attnd listens (default $ATTND_ENDPOINT, else attnd's own default)",
    )
    parser.add_argument("--tokens", type=int, default=n_new, help="tokens to make for each prompt")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="of the pool")
    return parser


def pool_spec(model: llama.Llama, dtype: str = "f32", n_blocks: int = 1024) -> attnd.PoolSpec:
    """The model's geometry; n_blocks of 16 tokens, 64 KiB each in f32."""
    return attnd.PoolSpec(
        name=f"bytelm-{dtype}",
        num_layers=model.num_layers,
        num_q_heads=model.num_q_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim_k=model.head_dim,
        n_blocks=n_blocks,
        q_dtype=dtype,
        model="bytelm",
    )


class AttndAttention:
    """Attention whose cache is in the daemon: one attnd sequence for each of the model's."""

    def __init__(self, pool: attnd.Pool, sequences: dict[int, attnd.Sequence] | None = None):
        """sequences: those that exist already, by the model's number for them."""
        self.pool = pool
        self.sequences = dict(sequences or {})
        self.is_bf16 = pool.spec.q_dtype == "bf16"
        self.items: attnd.Items | None = None
        self.parents: list[int] | None = None

    def begin(self, items: Sequence[llama.Item]) -> None:
        for item in items:
            if item.seq not in self.sequences:
                self.sequences[item.seq] = self.pool.open()
        self.items = self.pool.items((self.sequences[i.seq], i.pos, i.n_tokens) for i in items)
        self.parents = [p for i in items for p in i.parents] or None

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        assert self.items is not None
        if self.is_bf16:
            q, k, v = to_bf16(q), to_bf16(k), to_bf16(v)
        out = self.pool.step(layer, self.items, q, k, v, parents=self.parents).out
        return from_bf16(out) if self.is_bf16 else out

    def close(self) -> None:
        for sequence in self.sequences.values():
            sequence.close()
        self.sequences.clear()

    def __enter__(self) -> AttndAttention:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 to bf16, held as uint16, rounded to nearest even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def show(prompts: Sequence[bytes], texts: Sequence[bytes], width: int = 60) -> None:
    for prompt, text in zip(prompts, texts):
        print(f"  {prompt.decode()!r}: {text[:width].decode(errors='replace')!r}...")
