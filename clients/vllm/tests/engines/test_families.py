"""Small models of random weights, one of each family, in vLLM over attnd, in float32: their greedy texts are
those of vLLM's own attention and, but for Llama 4's, of Transformers. families.py has the models.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from families import FAMILIES
from test_engines import BUILD, check_empty, daemon  # noqa: F401: a fixture

HERE = pathlib.Path(__file__).resolve().parent
REFUSED = {"deepseek-v3.2": "an indexer", "glm-5": "an indexer"}


def texts(side, folder, **more):
    env = {k: v for k, v in os.environ.items() if not k.startswith("ATTND_")}
    env |= {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive", "VLLM_CPU_KVCACHE_SPACE": "1"}
    sources = os.pathsep.join(str(HERE.parents[3] / p) for p in ("clients/python/src", "clients/vllm/src"))
    env |= {"ATTN_LIBRARY": str(BUILD / "lib/libattn.so.0"), "PYTHONPATH": sources, "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, str(HERE / "families.py"), "text", side, str(folder)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"family"')]
    return {x["family"]: x for x in said}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("families")
    subprocess.run([sys.executable, str(HERE / "families.py"), "make", str(path)], check=True)
    return path


def test_texts_of_all_families(folder, daemon):  # noqa: F811
    of_transformers, own = texts("transformers", folder), texts("own", folder)
    mine = texts("attnd", folder, ATTND_VLLM=daemon.url)
    assert list(mine) == list(FAMILIES)
    for family, said in mine.items():
        if family in REFUSED:
            assert REFUSED[family] in said["refused"]
            continue
        assert said.get("texts") == own[family]["texts"], (family, said)
        if family != "llama-4":  # vLLM's own parts from Transformers' in 2 of 8
            assert said["texts"] == of_transformers[family]["texts"], family
    check_empty(daemon)
