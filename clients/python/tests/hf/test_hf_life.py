"""Workers of attnd.hf that outlive their daemon, and the pools that they find or make."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

import torch  # noqa: E402
from hf_models import GREEDY, gemma3, gpt_oss, llama, make, prompts, qwen3  # noqa: E402

import attnd  # noqa: E402
import attnd.hf  # noqa: E402


@pytest.mark.parametrize("owner", ["worker", "user"])
def test_a_worker_goes_on_after_a_restart(own_daemon, owner):
    model = make(llama)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    client = own_daemon.url if owner == "worker" else attnd.connect(own_daemon.url)
    with attnd.hf.attach(model, client, n_blocks=64) as worker:
        assert torch.equal(worker.generate(**inputs, **GREEDY), want)
        kept = worker.cache()
        worker.generate(**inputs, **GREEDY, past_key_values=kept)
        own_daemon.restart()
        assert torch.equal(worker.generate(**inputs, **GREEDY), want)  # by itself

        own_daemon.restart()
        with worker.cache() as cache, pytest.raises(attnd.SessionGoneError):
            worker.generate(**inputs, **GREEDY, past_key_values=cache)
        with pytest.raises(attnd.SequenceGoneError, match="begin a new one"), torch.no_grad():
            model(input_ids=inputs["input_ids"][:, :1], past_key_values=kept)
        worker.reopen()
        with worker.cache() as cache:
            assert torch.equal(worker.generate(**inputs, **GREEDY, past_key_values=cache), want)
    if owner == "user":
        assert not client.is_closed
        client.close()


def test_two_workers_of_one_client_go_on_after_a_restart(own_daemon):
    models = make(llama), make(qwen3)
    inputs = prompts(models[0])
    wants = [m.generate(**inputs, **GREEDY) for m in models]
    with attnd.connect(own_daemon.url) as client:
        workers = [attnd.hf.attach(m, client, n_blocks=64) for m in models]
        own_daemon.restart()
        for _ in range(2):
            for worker, want in zip(workers, wants):
                assert torch.equal(worker.generate(**inputs, **GREEDY), want)
        for worker in workers:
            worker.close()


@pytest.mark.parametrize("then", ["restarted", "killed"])
def test_close_does_not_raise_for_what_is_gone(own_daemon, then):
    model = make(llama)
    inputs = prompts(model)
    client = attnd.connect(own_daemon.url, timeout=0.5)
    worker = attnd.hf.attach(model, client, n_blocks=64)
    for _ in range(2):
        worker.generate(**inputs, **GREEDY, past_key_values=worker.cache())
    if then == "restarted":
        own_daemon.restart()
    else:
        own_daemon.process.kill()
        own_daemon.process.wait()
    worker.close()
    assert model.config._attn_implementation == "eager"
    client.close()


def test_a_pool_is_found_again_or_made_beside_it(own_daemon):
    model = make(llama)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    names = []

    def n_blocks(**options):
        with attnd.hf.attach(model, client, **options) as worker:
            assert torch.equal(worker.generate(**inputs, **GREEDY), want)
            names.append(worker.pool.spec.name)
            return worker.pool.spec.n_blocks

    with attnd.connect(own_daemon.url) as client:
        assert n_blocks(n_blocks=64) == 64
        assert n_blocks(n_blocks=32) == 64
        assert n_blocks() == 64
        assert n_blocks(n_blocks=96) == 96  # nobody has the small one: made anew
        assert n_blocks(n_tokens=90 * 16) == 96
        assert n_blocks(n_tokens=100 * 16 + 1) == 101  # blocks of 16 tokens, rounded up
        with client.pool(names[-1]):
            assert n_blocks(n_blocks=120) == 120  # beside it
            assert names[-1] != names[-2]
        assert n_blocks(n_tokens=64 * 16) == 101
        assert n_blocks(name="mine", n_blocks=24) == 24
        with client.pool("mine"):
            with pytest.raises(attnd.AlreadyExistsError, match="mine.*25 blocks.*another name"):
                n_blocks(name="mine", n_blocks=25)
        assert n_blocks(name="mine", n_blocks=25) == 25
        with pytest.raises(ValueError, match="n_tokens.*n_blocks"):
            n_blocks(n_tokens=64, n_blocks=4)
    assert model.config._attn_implementation == "eager"


def test_the_default_size_leaves_room_and_shrinks_to_what_is_free(own_daemon):
    """Of 64 MiB: a token of these models takes 2 KiB."""

    def n_tokens(build, **changes):
        model = make(build)
        for name, value in changes.items():
            setattr(model.config, name, value)
        inputs = prompts(model)
        want = model.generate(**inputs, **GREEDY)
        with attnd.hf.attach(model, client) as worker:
            assert torch.equal(worker.generate(**inputs, **GREEDY), want)
            held.append(client.pool(worker.pool.spec.name))  # or it makes way when the worker closes
            return worker.pool.spec.n_blocks * worker.pool.spec.block_tokens

    held = []
    with attnd.connect(own_daemon.url) as client:
        assert [n_tokens(build) for build in (llama, qwen3, gpt_oss)] == [8192] * 3
        client.create_pool(attnd.PoolSpec("filler", 4, 4, 2, 32, n_blocks=320))
        assert n_tokens(gemma3) == 2048
        for i in range(4):  # half of what is left, each
            client.create_pool(attnd.PoolSpec(f"rest {i}", 4, 4, 2, 32))
        with pytest.raises(attnd.OutOfMemoryError, match="while a session has them"):
            n_tokens(llama, _name_or_path="another")
        held.pop(0).close()
        assert n_tokens(llama, _name_or_path="another") == 8192


def test_workers_of_one_client_release_their_pool_one_by_one(own_daemon):
    model, other = make(llama), make(llama)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    with attnd.connect(own_daemon.url) as client:
        workers = [attnd.hf.attach(m, client, n_blocks=1024) for m in (model, other)]
        assert workers[0].pool.spec.name == workers[1].pool.spec.name
        all_blocks = attnd.PoolSpec("all", 4, 4, 2, 32, n_blocks=2000)
        workers[0].close()
        with pytest.raises(attnd.OutOfMemoryError):
            client.create_pool(all_blocks)
        assert torch.equal(workers[1].generate(**inputs, **GREEDY), want)
        workers[1].close()
        client.create_pool(all_blocks)
