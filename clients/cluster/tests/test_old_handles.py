"""Old handles never append: links between workers, daemons, agents and etcd are cut, daemons and
agents stopped and killed, thousands of times (old_handles.py says how, and what is checked).

CLUSTER_CUTS is the number of cuts (40), CLUSTER_GROUPS of clusters of eight daemons that share an etcd
(1); CLUSTER_SEED repeats a choice of cuts.
"""

import json
import os
import random
import subprocess
import sys
import time

import pytest
from conftest import HERE
from etcd import Etcd

CUTS = int(os.environ.get("CLUSTER_CUTS", 40))
GROUPS = int(os.environ.get("CLUSTER_GROUPS", 1))
OF_A_SECOND = ("--heartbeat-interval", "50", "--election-timeout", "500")  # leases, at least
SEED = int(os.environ.get("CLUSTER_SEED", random.randrange(1 << 30)))


@pytest.fixture
def etcd(tmp_path):
    with Etcd(tmp_path / "e", 1, options=OF_A_SECOND) as e:
        yield e


def test_no_old_handle_appends_after_its_daemon_was_lost(tmp_path, etcd):
    print("seed", SEED)
    processes, total = [], {}
    try:
        for i in range(GROUPS):
            prefix = f"g{i}"
            with open(tmp_path / f"{prefix}.txt", "w") as out:
                command = [sys.executable, "-B", HERE / "old_handles.py", tmp_path, etcd.url]
                command += [prefix, str(CUTS // GROUPS), str(SEED + i)]
                processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))
        while any(process.poll() is None for process in processes):
            for i, process in enumerate(processes):
                assert not process.poll(), (tmp_path / f"g{i}.txt").read_text()[-10000:]
            time.sleep(0.1)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    for i in range(GROUPS):
        counts = json.loads((tmp_path / f"g{i}.txt").read_text().splitlines()[-1])
        for what, n in counts.items():
            total[what] = max(n, total.get(what, 0)) if what == "seconds" else n + total.get(what, 0)
    print(json.dumps(total, indent=1, sort_keys=True))
    assert total["cuts"] >= CUTS // GROUPS * GROUPS and total["lost_and_back"] > 0
    assert total["looks"] >= GROUPS and sum(n for w, n in total.items() if "refused" in w) > 0
