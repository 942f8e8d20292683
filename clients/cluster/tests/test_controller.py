"""The controller and what operators ask: decisions as pure functions, then two controllers on a real etcd, of which
the leader is killed."""

import json
import os
import random
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import attnd
import numpy as np
import pytest
from conftest import BUILD, await_
from etcd import free_ports
from ledger import VOCAB, Text, rebuild
from rig import SPEC, Host

import attnd_cluster
from attnd_cluster import shares
from attnd_cluster.balance import choose, divide, gaps, replicas
from attnd_cluster.keys import LEAVING, Member, PoolLoad


def member(name, free, state="serving", n=100):
    return Member(name, f"tcp://{name}:1", state=state, pools={"p": PoolLoad(n, free, 1)})


def test_a_wide_gap_is_closed_by_half_and_a_narrow_one_is_left():
    members = {m.name: m for m in (member("a", 10), member("b", 90), member("c", 50))}
    (gap,) = gaps(members)
    assert (gap.source, gap.target, gap.n_blocks) == ("a", "b", 40)
    assert gaps({m.name: m for m in (member("a", 45), member("b", 60))}) == []
    assert gaps({m.name: m for m in (member("a", 10), member("b", 90, LEAVING))}) == []
    listed = [{"sequence": str(i), "pool": "p", "blocks": b} for i, b in enumerate((41, 40, 3, 0))]
    assert choose(gap, listed)["sequence"] == "1"
    assert choose(gap, [{**s, "pool": "q"} for s in listed]) is None


def test_parts_of_a_quota_sum_up_and_cover_what_is_used():
    rng = random.Random(5)
    for _ in range(2000):
        used = {str(i): rng.choice((0, rng.randrange(50))) for i in range(rng.randrange(1, 9))}
        total = rng.randrange(1, 300)
        parts = divide(total, used)
        assert sum(parts.values()) == total or sum(used.values()) == 0 < total
        assert sum(parts.values()) == total
        if sum(used.values()) <= total:
            assert all(parts[n] >= used[n] for n in used)
    assert divide(10, {}) == {} and divide(9, {"a": 0, "b": 6}) == {"a": 1, "b": 8}


def test_there_should_be_as_many_daemons_as_blocks_and_queues_ask_for():
    def wanted(*members):
        return replicas({m.name: m for m in members}, 0.8, 0.02)

    assert wanted() == 1 == wanted(member("a", 100)) == wanted(member("a", 20))
    assert wanted(member("a", 10)) == 2
    assert wanted(member("a", 0), member("b", 0), member("c", 0), member("d", 0)) == 5
    assert wanted(member("a", 90), member("b", 80), member("c", 95)) == 1
    assert wanted(member("a", 0), member("b", 0, LEAVING)) == 2
    assert wanted(member("a", 0), member("b", 0)._replace(pools=None)) == 3
    slow = [member(n, 100)._replace(queue_seconds=0.03) for n in "ab"]
    assert wanted(*slow) == 3
    assert wanted(*(m._replace(queue_seconds=9.0) for m in slow)) == 4


def test_shares_go_into_the_sections_of_their_tenants_and_nothing_else_changes(tmp_path):
    file = tmp_path / "tenants"
    file.write_text("# ours\n[t]\ntoken_sha256 = ab\nsequences = 5\n\n[other]\nsequences = 9\n")
    file.chmod(0o640)
    assert shares.apply(
        str(file), {"t": {"sequences": 7, "sessions": 3}, "nobody": {"sequences": 1}}
    )
    want = "# ours\n[t]\ntoken_sha256 = ab\nsequences = 7\nsessions = 3\n\n[other]\nsequences = 9\n"
    assert file.read_text() == want and file.stat().st_mode & 0o777 == 0o640
    assert not shares.apply(str(file), {"t": {"sequences": 7, "sessions": 3}})


@pytest.fixture
def cluster(tmp_path, etcd1):
    """Two hosts with a tenant, both registered."""
    hosts = [Host(tmp_path, n, etcd1.url, ip="127.0.0.1", ttl=30) for n in "ab"]
    for host in hosts:
        host.start_daemon()
        host.start_agent("--tenants", str(tmp_path / host.name / "tenants"))
    options = {"rebuild": rebuild, "idle": 0.5, "token_file": hosts[0].key_file}
    with attnd_cluster.connect(f"cluster+{etcd1.url}", **options) as client:
        assert client.members.wait(300, lambda now: len(now) == 2)
        yield hosts, client
    for host in hosts:
        host.close()


def start_controller(etcd, host, log, *options):
    command = [sys.executable, "-B", "-m", "attnd_cluster.controller", "--registry", etcd.url]
    command += ["--token-file", host.key_file, "--ttl", "1", "--every", "0.1", *options]
    with open(log, "ab") as f:
        return subprocess.Popen(command, stdout=f, stderr=f, start_new_session=True)


def metrics(port):
    """What a controller's page has, by name and labels; {} before it is there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as r:
            lines = [x for x in r.read().decode().splitlines() if not x.startswith("#")]
    except OSError:
        return {}
    return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines)}


def ask(etcd, host, *words):
    command = [sys.executable, "-B", "-m", "attnd_cluster.command", "--registry", etcd.url]
    command += ["--token-file", host.key_file, "--json", *words]
    r = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return (r.returncode, json.loads(r.stdout) if r.stdout else r.stderr)


def test_a_page_says_that_nothing_is_known_rather_than_that_nobody_is_there(cluster, etcd1, tmp_path):
    hosts, _ = cluster
    (port,) = free_ports(1)
    etcd1.signal(0, signal.SIGSTOP)
    log = tmp_path / "c.log"
    controller = start_controller(etcd1, hosts[0], log, "--http", f"127.0.0.1:{port}")

    def page():
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).status
        except urllib.error.HTTPError as e:
            return e.code
        except OSError:
            return 0

    try:
        assert await_("an answer", page) == 503
        etcd1.signal(0, signal.SIGCONT)
        await_("a page", lambda: page() == 200)
        serving = 'attnd_cluster_members{state="serving"}'
        await_("both", lambda: metrics(port)[serving] == len(hosts))
    finally:
        os.killpg(controller.pid, signal.SIGKILL)
        controller.wait()


def test_one_controller_leads_rebalances_and_divides_and_another_follows_its_death(
    cluster, etcd1, tmp_path
):
    hosts, client = cluster
    pool = client.create_pool(SPEC)
    rng = np.random.default_rng(3)
    texts = [Text(pool, [int(x) for x in rng.integers(0, VOCAB, 200)]) for _ in range(6)]
    for t in texts:
        t.seq.move("a")
    logs = [tmp_path / "c0.log", tmp_path / "c1.log"]
    ports = free_ports(2)
    controllers = [
        start_controller(etcd1, hosts[0], log, "--http", f"127.0.0.1:{port}")
        for log, port in zip(logs, ports)
    ]
    try:
        await_("that one leads", lambda: sum("leads" in log.read_text() for log in logs) == 1)
        first = 0 if "leads" in logs[0].read_text() else 1
        await_("that it says so", lambda: metrics(ports[first]).get("attnd_controller_leads"))
        for port in ports:  # whoever leads, all say how many daemons there should be
            page = await_("a page", lambda: metrics(port))
            assert page['attnd_cluster_members{state="serving"}'] == len(hosts)
            assert page["attnd_cluster_desired_replicas"] >= 1

        def moved():
            return [t for t in texts if t.seq.where == "b"]

        def on_b():
            with attnd.connect(f"ipc://{hosts[1].socket}") as operator:
                return operator.inspect("sequences")["sequences"]

        await_("a rebalance", lambda: len(on_b()) >= 2)

        def found():  # by their workers, where they are
            for t in texts:
                t.decode()
                t.verify()
            return len(moved()) >= 2

        await_("workers", found)
        assert len(moved()) <= 3
        # quotas over both
        quotas = tmp_path / "quotas.json"
        quotas.write_text('{"t": {"sequences": 20}}')
        assert ask(etcd1, hosts[0], "quotas", str(quotas)) == (0, {"t": {"sequences": 20}})

        def most(host):
            with attnd.connect(f"ipc://{host.socket}") as operator:
                (t,) = operator.inspect("tenants")["tenants"]
                return t["max_sequences"] or 0

        await_("the shares", lambda: sum(most(h) for h in hosts) == 20)
        assert min(most(h) for h in hosts) >= 8
        # the leader dies
        os.killpg(controllers[first].pid, signal.SIGKILL)
        controllers[first].wait()
        await_("another", lambda: "leads" in logs[1 - first].read_text())
        for t in texts:
            t.decode()
            t.verify()
        quotas.write_text('{"t": {"sequences": 30}}')
        assert ask(etcd1, hosts[0], "quotas", str(quotas))[0] == 0
        await_("its shares", lambda: sum(most(h) for h in hosts) == 30)
    finally:
        for c in controllers:
            if c.poll() is None:
                c.send_signal(signal.SIGTERM)
                assert c.wait(60) == 0


def test_attnctl_cluster_is_attnd_cluster(cluster, etcd1, tmp_path):
    program = tmp_path / "attnd-cluster"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m attnd_cluster.command "$@"\n')
    program.chmod(0o755)

    def run(path, *words):
        env = {**os.environ, "PATH": path}
        return subprocess.run([BUILD / "bin" / "attnctl", *words], env=env, capture_output=True)

    words = "cluster", "--registry", etcd1.url, "--json", "members"
    r = run(f"{tmp_path}:{os.environ['PATH']}", *words)
    assert r.returncode == 0, r.stderr
    assert sorted(m["name"] for m in json.loads(r.stdout)["members"]) == ["a", "b"]
    assert run(f"{tmp_path}:{os.environ['PATH']}", "cluster", "nothing").returncode == 2
    r = run("/nonexistent", *words)
    assert r.returncode == 1 and b"attnd-cluster, of clients/cluster" in r.stderr
    assert run("/nonexistent", "--wait", "1", "cluster", "members").returncode == 2


def test_operators_see_and_move_what_is_there(cluster, etcd1):
    hosts, client = cluster
    pool = client.create_pool(SPEC)
    t = Text(pool, range(40))
    was, to = t.seq.where, "b" if t.seq.where == "a" else "a"
    code, listed = ask(etcd1, hosts[0], "members")
    assert code == 0 and sorted(m["name"] for m in listed["members"]) == ["a", "b"]
    assert ask(etcd1, hosts[0], "where", str(t.seq.id))[1]["member"] == was
    assert ask(etcd1, hosts[0], "move", str(t.seq.id), to) == (
        0,
        {"sequence": str(t.seq.id), "from": was, "to": to},
    )
    t.decode()
    assert t.seq.where == to
    t.verify()
    assert ask(etcd1, hosts[0], "rebalance") == (0, {"moved": 0})
    assert ask(etcd1, hosts[0], "evacuate", to)[0] == 0
    await_(
        "that it has gone", lambda: ask(etcd1, hosts[0], "where", str(t.seq.id))[1]["member"] == was
    )
    t.decode()
    t.verify()
    for words, named in ((("where", "1"), "sequence 1"), (("evacuate", "z"), "'z': a, b")):
        code, said = ask(etcd1, hosts[0], *words)
        assert code == 1 and named in said
