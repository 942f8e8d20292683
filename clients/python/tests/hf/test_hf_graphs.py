"""Decode steps as CUDA graphs; without a GPU, a recording that runs its pass again stands in for one."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

import torch  # noqa: E402

import attnd  # noqa: E402
from attnd.hf import _graphs  # noqa: E402
from attnd.hf._named import VERSION  # noqa: E402
from hf_models import GREEDY, deepseek_v3, gemma2, gpt_oss, llama, make, prompts, qwen3  # noqa: E402


class Count:
    """What the recordings of a test have done, and are to do."""

    def __init__(self):
        self.worker = None
        self.n_replays = 0
        self.error = 0.0  # added to a replay's output


def counted(recording, count):
    class Counted(recording):
        def replay(self):
            count.n_replays += 1
            outputs = super().replay()
            outputs["logits"] += count.error
            return outputs

    return Counted


def again(count):
    """In place of a graph: what was captured is run, and enqueues the layers, at every replay."""

    class Again:
        def __init__(self, run, cache):
            self.run = run

        def replay(self):
            (cache,) = count.worker._caches
            with cache.recorded(), count.worker.layers.recorded():
                try:
                    return self.run(cache)
                except attnd.UnsupportedError as e:
                    if VERSION < (5, 20) and "a mask of queries" in e.message:
                        pytest.skip("transformers 5.0 makes masks by position, of a step that has been")
                    raise

        @staticmethod
        def check(model):
            pass

    return Again


@pytest.fixture
def count(monkeypatch):
    c = Count()
    recording = _graphs.Recording if torch.cuda.is_available() else again(c)
    monkeypatch.setattr(_graphs, "Recording", counted(recording, c))
    return c


@pytest.fixture
def attach_graphs(attach, count):
    def attach_one(model, **options):
        worker = attach(model, lane=True, graphs=True, **options)
        count.worker = worker
        return worker

    return attach_one


@pytest.mark.parametrize("build", (llama, qwen3, gemma2, deepseek_v3), ids=lambda f: f.__name__)
def test_text_is_the_models_own(build, attach_graphs, count):
    """Rows of other lengths, so that there is padding."""
    model = make(build)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    worker = attach_graphs(model)
    for n in range(1, 3):
        assert torch.equal(worker.generate(**inputs, **GREEDY), want)
        assert worker.graphs.n_ready == 1
        # two steps before the capture, one beside its first replay, in the first text alone
        n_steps = want.shape[1] - inputs["input_ids"].shape[1] - 1
        assert count.n_replays == n * n_steps - 2
    assert "forward" not in model.__dict__


def step(worker, cache, ids, mask=None):
    column = cache.get_seq_length()
    with torch.no_grad():
        return worker.forward(
            input_ids=ids,
            attention_mask=mask,
            position_ids=torch.full_like(ids, column),
            past_key_values=cache,
            use_cache=True,
        )


def test_forward_is_the_models_own(attach_graphs, count):
    """Step by step, with a cache that is cut, selected from, and filled with several tokens."""
    model = make(llama)
    ids = torch.randint(3, 97, (3, 40), device=model.device)
    with torch.no_grad():
        want = model(input_ids=ids).logits
    worker = attach_graphs(model)
    with worker.cache() as cache:

        def feed(a, b):
            given = ids[:, a:b]
            with torch.no_grad():
                return worker.forward(input_ids=given, past_key_values=cache).logits

        def expect(a, b):
            got = feed(a, b)
            torch.testing.assert_close(got, want[:, a:b], atol=2e-4, rtol=1e-4)
            return got

        expect(0, 9)
        kept = [expect(n, n + 1) for n in range(9, 20)]
        n_replays = count.n_replays
        assert n_replays == 11 - 2
        cache.crop(15)
        for n in range(15, 20):
            assert torch.equal(feed(n, n + 1), kept[n - 9])
        assert count.n_replays == n_replays + 5
        expect(20, 30)
        expect(30, 31)
        cache.reorder_cache(torch.tensor([2, 0, 2], device=model.device))
        ids, want = ids[[2, 0, 2]], want[[2, 0, 2]]
        for n in range(31, 36):
            expect(n, n + 1)
        assert count.n_replays == n_replays + 5 + 1 + 5
        cache.batch_select_indices(torch.tensor([1, 2]))  # another shape: from the beginning
        ids, want = ids[[1, 2]], want[[1, 2]]
        for n in range(36, 40):
            expect(n, n + 1)
        assert count.n_replays == n_replays + 5 + 1 + 5 + 2
        assert worker.graphs.n_ready == 2


def test_what_is_no_such_step_runs_as_ever(attach_graphs, count):
    model = make(llama)
    worker = attach_graphs(model)
    ids = torch.randint(3, 97, (2, 1), device=model.device)
    with worker.cache() as cache, torch.no_grad():
        for _ in range(5):
            worker.forward(ids, past_key_values=cache)
        for _ in range(5):
            worker.forward(inputs_embeds=model.get_input_embeddings()(ids), past_key_values=cache)
        for _ in range(5):
            model(input_ids=ids, position_ids=ids, past_key_values=cache)
        assert cache.get_seq_length() == 15
    assert count.n_replays == 0 and worker.graphs.n_ready == 0


def test_a_replay_that_differs_is_refused_and_nothing_is_kept_of_it(attach_graphs, count):
    model = make(llama)
    ids = torch.randint(3, 97, (2, 1), device=model.device)
    with torch.no_grad():
        want = model(input_ids=ids.expand(2, 5)).logits
    worker = attach_graphs(model)
    count.error = 1e-3
    with worker.cache() as cache:
        for _ in range(3):  # the first, which opens the sequences and the lane, is no step yet
            step(worker, cache, ids)
        with pytest.raises(attnd.UnsupportedError, match="a replayed step has other logits"):
            step(worker, cache, ids)
        assert cache.get_seq_length() == 3
        count.error = 0.0
        got = [step(worker, cache, ids).logits for _ in range(2)][-1]
    torch.testing.assert_close(got, want[:, 4:], atol=2e-4, rtol=1e-4)


def test_a_lane_that_is_another_one_is_captured_anew(attach_graphs, count):
    model = make(llama)
    inputs = prompts(model)
    worker = attach_graphs(model)
    want = worker.generate(**inputs, **GREEDY)
    n = count.n_replays
    worker.layers.close()
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)
    assert count.n_replays == 2 * n


def test_output_is_the_callers(attach_graphs):
    """Not the graph's, which the next step writes over."""
    model = make(llama)
    worker = attach_graphs(model)
    ids = torch.randint(3, 97, (2, 1), device=model.device)
    with worker.cache() as cache:
        for _ in range(4):
            step(worker, cache, ids)
        a = step(worker, cache, ids)
        before = a.logits.clone()
        step(worker, cache, (ids + 1) % 97)
        assert torch.equal(a.logits, before) and a.past_key_values is cache


def test_padding_is_looked_at(attach_graphs):
    model = make(llama)
    worker = attach_graphs(model)
    ids = torch.randint(3, 97, (2, 1), device=model.device)
    mask = torch.ones(2, 9, dtype=torch.long, device=model.device)
    with worker.cache() as cache:
        for n in range(1, 6):
            step(worker, cache, ids, mask[:, :n])
        with pytest.raises(attnd.UnsupportedError, match="attention_mask was given before"):
            step(worker, cache, ids)
        wrong = mask[:, :6].clone()
        wrong[1, 3] = 0
        with pytest.raises(attnd.UnsupportedError, match="row 1: padding after a token"):
            step(worker, cache, ids, wrong)
        assert cache.get_seq_length() == 5


def test_refused_by_name(attach, count):
    with pytest.raises(attnd.UnsupportedError, match="graphs=True, and layers with sinks"):
        attach(make(gpt_oss), graphs=True)
    with pytest.raises(ValueError, match="graphs is True and lane is False"):
        attach(make(llama), graphs=True, lane=False)


def test_a_model_on_the_cpu_has_no_graphs(attach):
    model = make(llama).cpu()
    with pytest.raises(
        attnd.UnsupportedError, match="graphs=True, and the model is on cpu: not a GPU"
    ):
        attach(model, graphs=True)
