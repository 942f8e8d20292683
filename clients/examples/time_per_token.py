"""Time per token and blocks used while a model writes: a notebook's worth (cells begin with # %%).

Needs the package attnd[hf] and matplotlib; starts a daemon of its own. As a program it writes
time_per_token.png.
"""

# %% A daemon and a model over it
import pathlib
import time

import matplotlib.pyplot as plt
import torch
import transformers

import attnd
import attnd.hf

folder = pathlib.Path(__file__).resolve().parents[1] / "python" / "examples" / "bytelm"
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
daemon = attnd.Daemon()
client = daemon.connect()
worker = attnd.hf.attach(model, client, n_tokens=8192)


# %% What to measure: seconds of each token, and blocks after it
def write(batch: int, n_tokens: int = 200) -> tuple[list[float], list[int]]:
    prompt = torch.tensor([list(b"class Client:\n    def ")] * batch)
    seconds, blocks = [], []
    with worker.cache() as cache, torch.no_grad():
        token = prompt
        for _ in range(n_tokens):
            start = time.perf_counter()
            logits = model(input_ids=token, past_key_values=cache, use_cache=True).logits
            token = torch.multinomial(logits[:, -1].softmax(-1), 1)
            seconds.append(time.perf_counter() - start)
            blocks.append(client.stats()["blocks_used"])
    return seconds[1:], blocks[1:]  # the first brings the prompt


measured = {batch: write(batch) for batch in (1, 4, 16)}

# %% The picture
figure, (above, below) = plt.subplots(2, sharex=True, figsize=(7, 6))
for batch, (seconds, blocks) in measured.items():
    above.plot([s * 1e3 for s in seconds], label=f"{batch} sequences", linewidth=0.8)
    below.plot(blocks)
above.set_ylabel("ms per token")
above.set_ylim(bottom=0)
above.legend()
below.set_ylabel("blocks used")
below.set_xlabel("token")
figure.tight_layout()
figure.savefig("time_per_token.png")

# %% Blocks go back when a cache is closed; the daemon goes with the notebook, or now
print(client.stats()["blocks_used"], "blocks used at the end")
worker.close()
client.close()
daemon.close()
