"""A HuggingFace model over a cluster: the model's own text, also where a host is lost in the middle."""

import signal

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import attnd.hf  # noqa: E402
from rig import Host  # noqa: E402

torch.set_num_threads(1)
NEW = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}


class At(transformers.LogitsProcessor):
    """Does something at the n-th token."""

    def __init__(self, n, what):
        self.n, self.what = n, what

    def __call__(self, ids, scores):
        self.n -= 1
        if self.n == 0:
            self.what()
        return scores


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
        max_position_embeddings=512,
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_generate_says_the_same_and_begins_again_when_a_host_is_lost(tmp_path, etcd1, model):
    prompts = torch.randint(0, 99, (4, 20))
    want = model.generate(prompts, **NEW)
    hosts = [Host(tmp_path, n, etcd1.url, ttl=3).start() for n in "ab"]
    try:
        with attnd.connect(f"cluster+{etcd1.url}", timeout=600) as client:
            assert client.members.wait(300, lambda now: len(now) == 2)
            worker = attnd.hf.attach(model, client, n_tokens=1024, share_prefixes=True)
            for _ in range(2):
                assert torch.equal(worker.generate(prompts, **NEW), want)

            def lose():
                where = []
                for host in hosts:
                    with attnd.connect(f"ipc://{host.socket}") as operator:
                        where.append(len(operator.inspect("sequences")["sequences"]))
                assert min(where) > 0, where  # the batch is on both
                hosts[0].signal_agent(signal.SIGKILL)
                hosts[0].signal_daemon(signal.SIGKILL)

            processors = transformers.LogitsProcessorList([At(15, lose)])
            got = worker.generate(prompts, **NEW, logits_processor=processors)
            assert torch.equal(got, want)
            worker.close()
    finally:
        for host in hosts:
            host.close()
