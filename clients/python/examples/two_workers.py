"""Two worker processes, each with half of the prompts, share one daemon and one pool.

Neither knows of the other; the daemon computes their steps together when they come at the same time.
The text is compared with that of plain numpy attention: exit 1 if a token differs.
"""

from __future__ import annotations

import json
import subprocess
import sys

import llama
from over_attnd import PROMPTS, AttndAttention, arguments, pool_spec, show

import attnd


def work(url: str, dtype: str, n_new: int, which: slice) -> None:
    """A worker: generates for its prompts and prints the texts as JSON."""
    model = llama.Llama()
    with attnd.connect(url, name=f"worker {which.start}") as client:
        pool = client.create_pool(pool_spec(model, dtype))
        with AttndAttention(pool) as attention:
            texts = llama.generate(model, attention, PROMPTS[which], n_new)
    json.dump([t.decode("latin-1") for t in texts], sys.stdout)


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], 128)
    parser.add_argument("--worker", type=int, help="run as this worker (0 or 1)")
    args = parser.parse_args()
    half = len(PROMPTS) // 2
    if args.worker is not None:
        work(args.url, args.dtype, args.tokens, slice(args.worker * half, (args.worker + 1) * half))
        return 0

    command = [sys.executable, __file__, "--url", args.url, "--tokens", str(args.tokens)]
    command += ["--dtype", args.dtype, "--worker"]
    workers = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(2)
    ]
    outputs = [w.communicate()[0] for w in workers]
    if any(w.returncode != 0 for w in workers):
        return 1
    texts = [t.encode("latin-1") for o in outputs for t in json.loads(o)]
    show(PROMPTS, texts)

    model = llama.Llama()
    expected = llama.generate(model, llama.NumpyAttention(model.num_layers), PROMPTS, args.tokens)
    n_same = sum(a == b for a, b in zip(texts, expected))
    print(f"{n_same} of {len(texts)} texts of two workers are those of plain numpy attention")
    return 0 if n_same == len(texts) or args.dtype != "f32" else 1


if __name__ == "__main__":
    sys.exit(main())
