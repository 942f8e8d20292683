"""HuggingFace Transformers models with attnd as their attention and their KV cache.

    import attnd.hf

    model = AutoModelForCausalLM.from_pretrained(...).eval()
    with attnd.hf.attach(model, "ipc:///run/attnd/attnd.sock") as worker:
        ids = worker.generate(**tokenizer(texts, padding=True, return_tensors="pt"))

attach() runs one token through the model to see how each of its layers calls for attention (heads,
scaling, windows, soft cap, sinks), makes a pool of that, and switches the model to the attention
implementation "attnd", which importing this module registers. A Cache maps batch rows to sequences;
left padding stays out of it. Greedy search, sampling, beam search (by fork) and crop (by truncate)
work. What cannot be done is refused with UnsupportedError that names it: what a Cache hands to a
layer is no tensor, so no attention but attnd's can be computed with it.

q, k and v of a model on a GPU are copied to the host, and the output back: of prompts over shm:// straight
into the daemon's memory, at the bus's speed. Over a lane they stay on the GPU, and with graphs=True
decode steps are captured, too.

Continuous batching of an attached model (generate_batch(), init_continuous_batching(), transformers'
server) has its cache in the daemon as well.

_calls.py   the attention and the mask interface "attnd", and what a layer asks of them
_handed.py  what Cache.update() hands to a layer instead of keys and values
_latent.py  latent attention: what is stored and computed in place of its heads
_cache.py   Cache: rows and sequences, padding, one layer of one forward pass
_prefix.py  prompts that the cache has already
_key.py     what computes keys and values, as a number: the key of shared prefixes
_saved.py   rows as they were, for crops under windows
_lane.py    layers over a lane
_graphs.py  decode steps as CUDA graphs
_paged.py   the cache of continuous batching
_engine.py  continuous batching: transformers' managers over that cache
serve.py    a program: transformers' server with it
_worker.py  Worker: caches, steps, closing
_attach.py  attach(): what a model needs, its pool, switching its attention
"""

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401

    from ._attach import attach
    from ._cache import Cache
    from ._worker import Spent, Worker
except ImportError as e:
    raise ImportError("attnd.hf needs torch and transformers >= 5: pip install attnd[hf]") from e

__all__ = ["Cache", "Spent", "Worker", "attach"]
