"""Continuous batching of transformers over attnd: texts are those of generate(), token for token,
whatever comes, goes, is cancelled, does not fit, or is restarted."""

import concurrent.futures
import copy
import json
import os
import re
import subprocess
import sys
import urllib.request

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.23", reason="transformers 5.23 is not installed")

import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers as tf  # noqa: E402
from hf_models import gpt_oss, llama, llama4, make, qwen3  # noqa: E402

import attnd  # noqa: E402

PROMPT_LENGTHS = (11, 3, 17, 8, 33)


def tokens(n, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (n,), generator=g).tolist()


def prompts(lengths=PROMPT_LENGTHS, seed=1):
    return [tokens(n, seed + i) for i, n in enumerate(lengths)]


def config(n_new=24):
    return tf.GenerationConfig(
        do_sample=False, max_new_tokens=n_new, eos_token_id=-1, pad_token_id=0
    )


def batching(**options):
    return tf.ContinuousBatchingConfig(**options)


def want(model, ids, n_new=24):
    """The text of eager attention by itself; not while a manager runs, which would have it, too."""
    now = model.config._attn_implementation
    model.set_attn_implementation("eager")
    given = torch.tensor([ids], device=model.device)
    out = model.generate(given, do_sample=False, max_new_tokens=n_new, eos_token_id=None)
    model.set_attn_implementation(now)
    return out[0, len(ids) :].tolist()


def texts(results):
    assert all(r.error is None for r in results.values()), [r.error for r in results.values()]
    return [r.generated_tokens for r in results.values()]


@pytest.fixture
def model():
    return make(llama)


@pytest.fixture
def manager(model):
    """Starts managers of an attached model and stops them."""
    started = []

    def start(n_new=24, options=None):
        m = model.init_continuous_batching(
            generation_config=config(n_new), continuous_batching_config=options
        )
        m.start()
        started.append(m)
        return m

    yield start
    for m in started:
        m.stop(hard_stop=True)
        m.destroy()


def result_of(manager, request_id):
    """What comes last of a request; of others nothing is to come."""
    while True:
        got = manager.get_result(timeout=60)
        assert got is not None and got.request_id == request_id, got
        if got.is_finished():
            return got


def held(manager):
    return manager.batch_processor.cache._held


@pytest.mark.parametrize("build", [llama, qwen3, gpt_oss])
def test_a_batch_is_the_text_of_generate(attach, build):
    model = make(build)
    worker = attach(model)
    given = prompts()
    expected = [want(model, ids, 12) for ids in given]
    # 13 tokens at a time: prompts are cut, and mixed with decode steps
    for n_tokens in (None, 13):
        options = batching(max_batch_tokens=n_tokens)
        results = model.generate_batch(
            given, generation_config=config(12), continuous_batching_config=options
        )
        assert texts(results) == expected
    assert worker.generate(torch.tensor([given[0]]), max_new_tokens=3).shape == (1, 14)


def test_requests_come_and_go_and_are_cancelled(attach, model, manager):
    attach(model)
    first, second, third = prompts((9, 21, 5))
    one, two, three = want(model, first, 1), want(model, second, 6), want(model, third, 6)
    m = manager(400)
    m.add_request(first, request_id="first", streaming=True)
    assert m.get_result(timeout=60).generated_tokens == one
    m.add_request(second, request_id="second", max_new_tokens=6)
    while (got := m.get_result(timeout=60)).request_id == "first":
        assert not got.is_finished()
    assert got.is_finished() and got.generated_tokens == two
    m.cancel_request("first")
    m.add_request(third, request_id="third", max_new_tokens=6)
    while (got := m.get_result(timeout=60)).request_id == "first":
        assert not got.is_finished()
    assert got.generated_tokens == three
    assert not held(m)


def test_children_share_what_their_parent_has(attach, model):
    attach(model)
    given = prompts((20, 7))
    greedy = config(8)
    greedy.num_return_sequences = 3  # greedy children are refused when it is made
    results = model.generate_batch(given, generation_config=greedy)
    assert texts(results) == [want(model, ids, 8) for ids in given for _ in range(3)]


def test_more_than_the_pool_holds_is_done_in_turn(attach, model):
    attach(model, n_blocks=8, name="small of batching")  # 128 tokens
    given = prompts((40, 30, 50, 20))
    results = model.generate_batch(given, generation_config=config(40))
    assert texts(results) == [want(model, ids, 40) for ids in given]


def test_a_request_that_can_never_fit_fails_alone(attach, model, manager):
    attach(model, n_blocks=4, name="tiny of batching")
    part, whole = want(model, tokens(60, 2), 5), want(model, tokens(9, 3), 4)
    m = manager()
    m.add_request(tokens(65, 1), request_id="long")
    assert "65 tokens, and the pool 'tiny of batching' has 4 blocks" in result_of(m, "long").error
    m.add_request(tokens(60, 2), request_id="grows", max_new_tokens=30)
    got = result_of(m, "grows")
    assert "has 4 blocks" in got.error and got.generated_tokens == part
    m.add_request(tokens(9, 3), request_id="fits", max_new_tokens=4)
    assert result_of(m, "fits").generated_tokens == whole


def test_blocks_that_others_have_are_waited_for(attach, model, manager):
    worker = attach(model, n_blocks=8, name="shared of batching")
    ids = torch.tensor([tokens(80, 4)], device=model.device)
    given = prompts((20, 24))  # 4 blocks each, at the end
    expected = {name: want(model, ids, 30) for name, ids in zip("ab", given)}
    with torch.no_grad(), worker.cache() as cache:
        model(input_ids=ids, past_key_values=cache)  # 5 blocks
        m = manager(30)
        m.add_request(given[0], request_id="a")
        m.add_request(given[1], request_id="b")
        processor = None
        while processor is None or not processor._waits:
            processor = m.batch_processor
            assert m.is_running()
    got = [m.get_result(timeout=60) for _ in given]
    assert {r.request_id: r.generated_tokens for r in got} == expected
    assert not held(m)


def test_prompts_and_texts_are_shared_with_other_processes(attach):
    model, other = make(llama, seed=201), make(llama, seed=201)
    system = tokens(50, 5)
    seen = []
    for one, n_cached in ((model, 0), (other, 48)):
        attach(one, share_prefixes=True)
        one.register_forward_hook(
            lambda m, args, kwargs, out: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        given = system + tokens(9, 6 + n_cached)
        results = one.generate_batch([given], generation_config=config(30))
        assert seen[0] == 59 - n_cached
        (text,) = texts(results)
        seen.clear()
        assert text == want(one, given, 30)
        seen.clear()
    # a conversation that goes on: 59 + 30 tokens, of which the last is known to nobody
    results = model.generate_batch([given + text + tokens(4, 7)], generation_config=config(2))
    assert seen[0] == 93 - 80
    options = batching(allow_block_sharing=False)
    seen.clear()
    model.generate_batch(
        [given], generation_config=config(2), continuous_batching_config=options
    )
    assert seen[0] == 59 and texts(results)[0]


def test_a_restart_of_the_daemon_is_a_pause(own_daemon, model, manager):
    import attnd.hf

    with attnd.hf.attach(model, own_daemon.url, n_blocks=32):
        given = prompts((20, 30))
        expected = {name: want(model, ids, 40) for name, ids in zip("ab", given)}
        m = manager(40)
        m.add_request(given[0], request_id="a", streaming=True)
        m.add_request(given[1], request_id="b")
        m.get_result(timeout=60)
        own_daemon.restart()
        done = {}
        while len(done) < 2:
            got = m.get_result(timeout=60)
            assert got is not None
            if got.is_finished():
                done[got.request_id] = got.generated_tokens
        assert done == expected


def test_what_cannot_be_done_is_refused_by_name(attach, model):
    worker = attach(model)

    def refused(what, m=model, **options):
        with pytest.raises(attnd.UnsupportedError, match=what):
            m.init_continuous_batching(
                generation_config=config(), continuous_batching_config=batching(**options)
            )

    refused("num_blocks 7: pools have n_blocks=", num_blocks=7)
    refused("use_cuda_graph True", use_cuda_graph=True)
    refused("use_async_batching True", use_async_batching=True)
    refused("scheduler_type 'none'", scheduler_type="none")
    refused("cpu_offload_space 1.0", cpu_offload_space=1.0)
    refused("not attached itself", m=copy.deepcopy(model))
    chunked = make(llama4)
    attach(chunked)
    refused("chunked layers", m=chunked)
    model.set_attn_implementation("eager")
    refused("set to 'eager'")
    worker.close()
    model.set_attn_implementation("sdpa")
    options = batching(auto_switch_to_flash=False, num_blocks=4, max_batch_tokens=64)
    results = model.generate_batch(
        prompts((5,)), generation_config=config(2), continuous_batching_config=options
    )
    assert texts(results) == [want(model, prompts((5,))[0], 2)]  # transformers' own again


def test_nothing_is_left_behind(attach, model, manager):
    worker = attach(model)
    m = manager(400)
    m.add_request(tokens(9, 1), request_id="a", streaming=True)
    m.get_result(timeout=60)
    (held_one,) = held(m).values()
    assert held_one.row is not None and len(worker._caches) == 1
    m.stop(hard_stop=True)
    assert not worker._caches
    with pytest.raises(attnd.NotFoundError):
        held_one.row[0].fork()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model whose words are t0 to t96."""
    folder = tmp_path_factory.mktemp("model")
    model = make(llama, seed=301)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"t{i}": i for i in range(97)}, unk_token="t0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def test_two_servers_on_one_daemon(daemon, saved):
    """transformers' own server, each in a process of its own, with requests at the same time."""
    pytest.importorskip("fastapi", reason="what transformers serve needs is not installed")
    pytest.importorskip("uvicorn", reason="what transformers serve needs is not installed")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-m", "attnd.hf.serve", "--attnd", daemon.url, "--share-prefixes"]
    command += ["--n-tokens", "2048", str(saved), "--port", "0", "--device", "cpu", "--dtype", "auto"]
    servers = [
        subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    model = tf.AutoModelForCausalLM.from_pretrained(saved)
    model.set_attn_implementation("eager")
    given = prompts((40, 23, 9, 5))
    expected = [want(model, ids, 12) for ids in given]
    try:
        urls = [address_of(server) for server in servers]

        def ask(i):
            body = {"model": str(saved), "prompt": " ".join(f"t{t}" for t in given[i % 4])}
            body |= {"max_tokens": 12, "temperature": 0}
            request = urllib.request.Request(
                f"{urls[i // 4]}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=240) as answer:
                (choice,) = json.load(answer)["choices"]
            return [int(word[1:]) for word in choice["text"].split()]

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, range(8))) == expected * 2
    finally:
        for server in servers:
            server.kill()
            server.communicate()


def address_of(server):
    """Where it says that it listens."""
    said = []
    for line in server.stderr:
        said.append(line)
        if found := re.search(r"running on (http://\S+)", line):
            return found[1]
    raise AssertionError("".join(said))
