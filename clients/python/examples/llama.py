"""A Llama forward pass in plain numpy whose attention is somebody else's.

The model does embeddings, RMSNorm, rotary positions, projections and SwiGLU; attention is an object
with one method, so that the same model runs over attnd or over plain numpy:

    attend(layer, q, k, v) -> out    q [tokens, num_q_heads, head_dim], k and v [tokens, num_kv_heads,
                                     head_dim], all float32; out as q

Tokens of several sequences are packed one after another ("ragged batch"); which token belongs to
which sequence is the attention object's business, told by its begin(items).
"""

from __future__ import annotations

import copy
import json
import pathlib
from dataclasses import dataclass
from typing import Protocol, Sequence

import numpy as np

BYTELM = pathlib.Path(__file__).with_name("bytelm")


@dataclass(frozen=True)
class Item:
    """One sequence's part of a step: n_tokens new tokens at positions pos, pos + 1, ...

    With parents they are a tree: each has the index of an earlier one, or -1, and the position
    behind its parent's.
    """

    seq: int
    pos: int
    n_tokens: int
    parents: tuple[int, ...] = ()

    def positions(self) -> np.ndarray:
        if not self.parents:
            return np.arange(self.pos, self.pos + self.n_tokens)
        depth: list[int] = []
        for parent in self.parents:
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        return self.pos + np.array(depth)


class Attention(Protocol):
    def begin(self, items: Sequence[Item]) -> None:
        """Says which sequences the tokens of the next forward pass belong to."""

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Appends k and v, returns causal attention of q over everything cached."""


def load_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Every tensor of a bf16 or f32 safetensors file, widened to float32."""
    raw = path.read_bytes()
    header_bytes = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + header_bytes])
    tensors = {}
    for name, spec in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + header_bytes + x for x in spec["data_offsets"])
        if spec["dtype"] == "BF16":
            bits = np.frombuffer(raw[begin:end], "<u2").astype(np.uint32) << 16
            values = bits.view(np.float32)
        elif spec["dtype"] == "F32":
            values = np.frombuffer(raw[begin:end], "<f4")
        else:
            raise ValueError(f"{path}: tensor {name} has dtype {spec['dtype']}, want BF16 or F32")
        tensors[name] = values.reshape(spec["shape"])
    return tensors


class Llama:
    """A Llama-architecture model with tied embeddings, in float32."""

    def __init__(self, folder: pathlib.Path = BYTELM):
        """Loads config.json and model.safetensors."""
        config = json.loads((folder / "config.json").read_text())
        self.num_layers = config["num_hidden_layers"]
        self.num_q_heads = config["num_attention_heads"]
        self.num_kv_heads = config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.eps = config["rms_norm_eps"]
        theta = config["rope_parameters"]["rope_theta"]
        exponent = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        self.inverse_frequency = theta**-exponent
        self.weights = load_safetensors(folder / "model.safetensors")

    def first_layers(self, num_layers: int) -> Llama:
        """The model of the first num_layers only, on the same weights."""
        model = copy.copy(self)
        model.num_layers = num_layers
        return model

    def forward(
        self, tokens: np.ndarray, items: Sequence[Item], attention: Attention
    ) -> np.ndarray:
        """Logits [len(tokens), vocab] of the packed tokens of items."""
        positions = np.concatenate([i.positions() for i in items])
        angles = positions[:, None] * self.inverse_frequency
        cos = np.cos(angles).astype(np.float32)[:, None, :]
        sin = np.sin(angles).astype(np.float32)[:, None, :]
        attention.begin(items)
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.num_layers):
            x = x + self._attention_block(layer, x, cos, sin, attention)
            x = x + self._mlp_block(layer, x)
        x = self._norm(x, "model.norm.weight")
        return x @ self.weights["model.embed_tokens.weight"].T

    def _attention_block(self, layer, x, cos, sin, attention):
        prefix = f"model.layers.{layer}."
        n = len(x)
        h = self._norm(x, prefix + "input_layernorm.weight")
        q = self._linear(h, prefix + "self_attn.q_proj").reshape(n, self.num_q_heads, self.head_dim)
        k = self._linear(h, prefix + "self_attn.k_proj").reshape(
            n, self.num_kv_heads, self.head_dim
        )
        v = self._linear(h, prefix + "self_attn.v_proj").reshape(
            n, self.num_kv_heads, self.head_dim
        )
        out = attention.attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self._linear(out.reshape(n, -1), prefix + "self_attn.o_proj")

    def _mlp_block(self, layer, x):
        prefix = f"model.layers.{layer}."
        h = self._norm(x, prefix + "post_attention_layernorm.weight")
        gate = self._linear(h, prefix + "mlp.gate_proj")
        up = self._linear(h, prefix + "mlp.up_proj")
        return self._linear(gate / (1 + np.exp(-gate)) * up, prefix + "mlp.down_proj")

    def _linear(self, x, name):
        return x @ self.weights[name + ".weight"].T

    def _norm(self, x, name):
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x * scale.astype(np.float32) * self.weights[name]


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotary positions: halves of head_dim are the two coordinates of each rotated pair."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class NumpyAttention:
    """Attention over a cache of plain arrays: what attnd is compared with."""

    def __init__(self, num_layers: int):
        self.cache: list[dict[int, tuple[np.ndarray, np.ndarray]]] = [{} for _ in range(num_layers)]
        self.items: Sequence[Item] = ()

    def begin(self, items: Sequence[Item]) -> None:
        self.items = items

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        out = np.empty_like(q)
        row = 0
        for item in self.items:
            rows = slice(row, row + item.n_tokens)
            row += item.n_tokens
            keys, values = k[rows], v[rows]
            if item.pos:
                old_keys, old_values = self.cache[layer][item.seq]
                keys = np.concatenate([old_keys[: item.pos], keys])
                values = np.concatenate([old_values[: item.pos], values])
            self.cache[layer][item.seq] = keys, values
            out[rows] = causal_attention(q[rows], keys, values, item.pos)
        return out


def causal_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, pos: int) -> np.ndarray:
    """q [n, num_q_heads, d] at positions pos.., over k and v [m, num_kv_heads, d]."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(np.float32(q.shape[-1]))
    visible = np.arange(len(k)) <= pos + np.arange(len(q))[:, None]
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v)


def generate(model, attention, prompts: Sequence[bytes], n_new: int, on_step=None) -> list[bytes]:
    """Greedy continuation of all prompts at once: one prompt chunk each, then one token a step.

    on_step(logits, next_tokens) is called after every step.
    """
    items = [Item(i, 0, len(p)) for i, p in enumerate(prompts)]
    tokens = np.concatenate([np.frombuffer(p, np.uint8) for p in prompts])
    out: list[list[int]] = [[] for _ in prompts]
    for _ in range(n_new):
        logits = model.forward(tokens, items, attention)
        last = np.cumsum([i.n_tokens for i in items]) - 1
        tokens = logits[last].argmax(axis=-1)
        for line, token in zip(out, tokens):
            line.append(int(token))
        if on_step:
            on_step(logits[last], tokens)
        items = [Item(i.seq, i.pos + i.n_tokens, 1) for i in items]
    return [bytes(line) for line in out]
