"""clients/examples/serve.py: two servers on one daemon, streams, and a client that hangs up."""

import http.client
import json
import os
import subprocess
import sys
import threading

import pytest
from conftest import BUILD, PACKAGE, ROOT

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

EXAMPLES = ROOT / "clients" / "examples"
PROMPTS = ["def read(self, ", "class Client:\n    def "]


@pytest.fixture(scope="module")
def servers(daemon):
    """Two processes, as http.client.HTTPConnection takes them."""
    env = {**os.environ, "ATTND_ENDPOINT": daemon.url, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, str(EXAMPLES / "serve.py"), "--port", "0"]
    processes = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in "12"
    ]
    try:
        yield [p.stdout.readline().strip().removeprefix("http://") for p in processes]
    finally:
        for p in processes:
            p.terminate()
            p.communicate()


def post(server, path="/v1/completions", **body):
    connection = http.client.HTTPConnection(server, timeout=120)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def events(response):
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


def expected(n):
    sys.path.insert(0, str(PACKAGE / "examples"))
    import llama

    model = llama.Llama()
    attention = llama.NumpyAttention(model.num_layers)
    return [t.decode() for t in llama.generate(model, attention, [p.encode() for p in PROMPTS], n)]


GREEDY = dict(max_tokens=24, temperature=0)


def test_two_servers_answer_at_once_and_say_what_the_model_says(servers):
    texts = expected(24)
    answers = {}

    def ask(server, i, stream):
        _, response = post(server, prompt=PROMPTS[i], stream=stream, **GREEDY)
        if stream:
            parts = [e["choices"][0] for e in events(response)]
            answers[server, i, stream] = (
                "".join(p["text"] for p in parts),
                parts[-1]["finish_reason"],
            )
        else:
            body = json.load(response)
            assert body["usage"]["completion_tokens"] == 24
            answers[server, i, stream] = (
                body["choices"][0]["text"],
                body["choices"][0]["finish_reason"],
            )

    asks = [(s, i, stream) for s in servers for i in range(2) for stream in (False, True)]
    threads = [threading.Thread(target=ask, args=a) for a in asks]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert answers == {(s, i, stream): (texts[i], "length") for s, i, stream in asks}


def test_a_stop_ends_the_text_before_it(servers):
    text = expected(24)[0]
    stop = text[10:13]
    _, response = post(servers[0], prompt=PROMPTS[0], stop=[stop], stream=True, **GREEDY)
    parts = [e["choices"][0] for e in events(response)]
    assert "".join(p["text"] for p in parts) == text[: text.index(stop)]
    assert parts[-1]["finish_reason"] == "stop"


def test_a_client_that_hangs_up_frees_its_blocks(servers, client):
    def n_used():
        return client.stats()["blocks_used"]

    before = n_used()
    for server in servers:
        connection, response = post(
            server, prompt=PROMPTS[0], max_tokens=4000, temperature=0, stream=True
        )
        assert next(events(response))
        assert n_used() > before
        connection.close()
        response.close()
    while n_used() > before:  # long before 4000 tokens are made
        pass
    _, response = post(servers[0], prompt=PROMPTS[0], **GREEDY)
    assert json.load(response)["choices"][0]["text"] == expected(24)[0]


def test_what_is_wrong_is_named(servers):
    for body, why in (
        (dict(), "prompt is missing"),
        (dict(prompt="x", max_tokens=0), "max_tokens is 0, expected 1 to 65536"),
        (dict(prompt="x", temperature="hot"), "temperature is 'hot'"),
        (dict(prompt="x", n=2), "n is 2"),
    ):
        _, response = post(servers[0], **body)
        assert response.status == 400 and why in json.load(response)["error"]["message"]
    _, response = post(servers[0], "/v1/chat/completions", messages=[])
    assert response.status == 400 and "no chat template" in json.load(response)["error"]["message"]
    _, response = post(servers[0], "/v1/nothing")
    assert response.status == 404


def test_the_notebook_draws_its_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    env = {**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{BUILD / 'bin'}:{env['PATH']}"
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, EXAMPLES / "time_per_token.py"]
    r = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert r.stdout == "0 blocks used at the end\n", r.stderr
    assert (tmp_path / "time_per_token.png").read_bytes().startswith(b"\x89PNG")
