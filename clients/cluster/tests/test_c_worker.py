"""libattn-cluster: a worker in C (tests/clients/cluster_worker.c, which compares every output with
float64) over several daemons, and where it and the Python client place the same prompts."""

import json
import os
import random
import signal
import subprocess
import sys

import attnd
import pytest
from conftest import BUILD, await_
from rig import SPEC, Host

import attnd_cluster
import attnd_cluster.pool
from attnd_cluster.registry import open_registry

SEED = random.randrange(1 << 30)
LONG = 300.0


class Worker:
    """The program; ask() gives the words behind "ok"."""

    def __init__(self, url, *options, idle_ms=200, probe_ms=int(LONG * 1000)):
        command = [str(BUILD / "bin" / "cluster_worker"), url, str(idle_ms), str(probe_ms), *options]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def send(self, *words) -> None:
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """The line; the program's end is an AssertionError, which pytest shows with its words."""
        line = self._process.stdout.readline().rstrip("\n")
        assert line, f"cluster_worker left with {self._process.wait()}"
        return line

    def ask(self, *words) -> list[str]:
        self.send(*words)
        line = self.answer()
        assert line.split()[0] == "ok", line
        return line.split()[1:]

    def refused(self, *words) -> str:
        self.send(*words)
        line = self.answer()
        assert line.startswith("error "), line
        return line[len("error ") :]

    def members(self):
        return json.loads(" ".join(self.ask("members")))

    def place(self, ids, adapter=0):
        """Its number, the member, cached tokens, its id."""
        number, member, cached, id = self.ask("place", adapter, *ids)
        return int(number), member, int(cached), int(id)

    def close(self) -> int:
        self._process.stdin.close()
        self._process.stdout.close()
        return self._process.wait(LONG)


@pytest.fixture
def start(tmp_path):
    """worker(url), host(name): ended with the test. A worker that was left alone leaves with 0."""
    print("seed", SEED)
    workers, hosts = [], []

    class Start:
        @staticmethod
        def worker(*words, **options):
            workers.append(Worker(*words, **options))
            return workers[-1]

        @staticmethod
        def connected(*words, **options):
            worker = Start.worker(*words, **options)
            assert worker.answer() == "ok"
            return worker

        @staticmethod
        def host(name, registry="", **options):
            hosts.append(Host(tmp_path, name, registry, **options))
            return hosts[-1]

    yield Start
    for host in hosts:
        for process in (host.agent, host.daemon):  # so that no worker waits for them
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT)
    codes = [w.close() for w in workers]
    for host in hosts:
        host.close()
    assert codes == [0] * len(codes)


@pytest.fixture
def hosts(start, etcd1):
    """a, b and c, registered."""
    made = {n: start.host(n, etcd1.url, ttl=10).start() for n in "abc"}
    for host in made.values():
        host.await_agent()
    return made


def prompt(rng, n):
    return [rng.randrange(997) for _ in range(n)]


def everybody(worker, names):
    await_("all members", lambda: sorted(worker.members()["members"]) == sorted(names))


def write(path, members):
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"members": members}))
    new.rename(path)


def in_a_file(start, path):
    """Daemons a and b, which the file names, and its url."""
    made = {n: start.host(n) for n in "ab"}
    for host in made.values():
        host.start_daemon()
    write(path, [{"name": n, "url": h.url} for n, h in made.items()])
    return made, f"cluster+file://{path}"


def test_prompts_go_where_the_python_client_places_them(start, tmp_path, monkeypatch):
    rng, path = random.Random(SEED), tmp_path / "members"
    hosts = [start.host(f"host-{i}") for i in range(7)]
    members, queues = [], [0, 0, 0, 0.001, 0.005, 0.01, 0.03]
    rng.shuffle(queues)
    for host, queue in zip(hosts, queues):
        host.start_daemon()
        loads = {"p": [128, rng.randrange(129), 0]}
        members.append({"name": host.name, "url": host.url, "queue_seconds": queue, "pools": loads})
    members[-1]["state"] = "leaving"
    write(path, members)
    url = f"cluster+file://{path}"
    first = start.connected(url)
    seeds = [prompt(rng, rng.randrange(20, 250)) for _ in range(12)]
    for ids in seeds:
        number, *_ = first.place(ids)
        first.ask("feed", number)
        first.ask("close", number)
    for _ in range(6):  # blocks that are not free meanwhile
        first.ask("feed", first.place(prompt(rng, rng.randrange(200, 900)))[0])
    monkeypatch.setattr(attnd_cluster.pool, "_PROBE_SECONDS", LONG)
    worker = start.connected(url)
    seen, n_cached = set(), 0
    with attnd_cluster.connect(url, timeout=LONG) as client:
        pool = client.create_pool(SPEC)
        for _ in range(200):
            begins = rng.choice([*seeds, []])
            ids = begins[: rng.randrange(len(begins) + 1)] + prompt(rng, rng.randrange(80))
            adapter = rng.choice([0, 0, 7])
            theirs = pool.open(tokens=ids, adapter=adapter)
            want = theirs.where, theirs.n_cached, theirs.id >> 48
            theirs.close()
            number, member, cached, id = worker.place(ids, adapter)
            assert (member, cached, id >> 48) == want, (len(ids), adapter)
            worker.ask("close", number)
            seen.add(member)
            n_cached += cached
    assert len(seen) >= 3 and hosts[-1].name not in seen and n_cached > 0


def test_a_sequence_is_followed_after_a_move_and_made_anew_after_its_hosts_death(start, hosts, etcd1):
    rng = random.Random(SEED)
    worker = start.connected(f"cluster+{etcd1.url}")
    everybody(worker, hosts)
    one, other = prompt(rng, 700), prompt(rng, 600)
    text, at, cached, id = worker.place(one)
    worker.ask("feed", text)
    second, elsewhere, _, _ = worker.place(other)
    worker.ask("feed", second)
    assert cached == 0 and elsewhere != at

    def queue():
        return max(m["queue_seconds"] for m in worker.members()["members"].values())

    for ids, member in ((one, at), (other, elsewhere)):
        before = queue()
        again, where, cached, _ = worker.place(ids + prompt(rng, 30))
        if max(before, queue()) < 0.02:  # of a busy machine's daemons another may be better
            assert (where, cached) == (member, len(ids) // 16 * 16)
        worker.ask("feed", again)
        worker.ask("close", again)
    target = next(n for n in hosts if n not in (at, elsewhere))
    worker.send("leave", text)  # decodes meanwhile
    command = [sys.executable, "-B", "-m", "attnd_cluster.command", "--registry", etcd1.url]
    command += ["--token-file", str(hosts[at]._dir / "token"), "move", str(id), target]
    moved = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
    assert moved.returncode == 0, moved.stderr
    where, followed, rebuilt = worker.answer().split()[1:]
    assert where == target and 0 < int(followed) < 1000 and rebuilt == "0"
    worker.ask("decode", text, 3)
    worker.ask("decode", second, 3)
    registry = open_registry(etcd1.url)

    def registration(name):
        return json.loads(registry.list("members/", LONG).entries[f"members/{name}"])["registration"]

    def fates():
        return registry.list("fates/", LONG).entries

    for fate in (b"", b"back:again"):  # the second time its agent has said that it comes, and does not
        ends = registration(where)
        if fate:
            assert registry.create(f"fates/{ends}", fate, registry.grant(LONG, LONG), LONG)
        lost, before = where, int(rebuilt)
        hosts[lost].signal_agent(signal.SIGKILL)
        hosts[lost].signal_daemon(signal.SIGKILL)
        where, _, rebuilt = worker.ask("decode", text, 3)
        assert where != lost and int(rebuilt) > before
        assert fates()["fates/again" if fate else f"fates/{ends}"] == b"dead"
    worker.ask("decode", second, 3)
    worker.ask("together", 8)


def test_a_step_that_waits_for_a_host_that_stands_still_ends_with_its_membership(start, hosts, etcd1):
    rng = random.Random(SEED)
    worker = start.connected(f"cluster+{etcd1.url}")
    everybody(worker, hosts)
    text, lost, *_ = worker.place(prompt(rng, 60))
    worker.ask("feed", text)
    hosts[lost].signal_daemon(signal.SIGSTOP)
    worker.send("decode", text, 3)  # its first step is not answered
    hosts[lost].signal_agent(signal.SIGSTOP)
    where, followed, rebuilt = worker.answer().split()[1:]
    assert where != lost and int(followed) == 1 and rebuilt == "1"
    worker.ask("decode", text, 3)


def test_members_stay_while_the_registry_is_away(start, hosts, etcd1):
    rng = random.Random(SEED)
    worker = start.connected(f"cluster+{etcd1.url}")
    everybody(worker, hosts)
    text, *_ = worker.place(prompt(rng, 50))
    worker.ask("feed", text)
    etcd1.signal(0, signal.SIGSTOP)
    try:
        await_("that it is noticed", lambda: worker.members()["is_frozen"])
        now = worker.members()
        assert sorted(now["members"]) == ["a", "b", "c"] and "etcd at 127.0.0.1:" in now["why"]
        worker.ask("decode", text, 5)
        other, *_ = worker.place(prompt(rng, 50))
        worker.ask("feed", other)
        assert worker.ask("follow", text, 1000)[2] == "0"
    finally:
        etcd1.signal(0, signal.SIGCONT)
    await_("the registry", lambda: not worker.members()["is_frozen"])
    everybody(worker, hosts)  # also where all leases have ended
    worker.ask("decode", text, 2)
    worker.ask("decode", other, 2)


def test_who_is_in_a_file_is_gone_when_the_file_says_so(start, tmp_path):
    rng, path = random.Random(SEED), tmp_path / "members"
    made, url = in_a_file(start, path)
    worker, strict = start.connected(url), start.connected(url, "no-rebuild")
    ids = prompt(rng, 60)
    text, at, *_ = worker.place(ids)
    worker.ask("feed", text)
    same, there, cached, _ = strict.place(ids)
    assert (there, cached) == (at, 48)
    strict.ask("feed", same)
    assert strict.ask("follow", same, 1000)[0] == at
    made[at].signal_daemon(signal.SIGKILL)
    why = strict.refused("follow", same, 100)
    assert why.startswith("ATTN_ETIMEDOUT") and f"member {at} " in why
    path.with_suffix(".bad").write_text('{"members": [{"name": "a"}]}')
    path.with_suffix(".bad").rename(path)
    await_("that it is noticed", lambda: worker.members()["is_frozen"])
    now = worker.members()
    assert sorted(now["members"]) == ["a", "b"] and "entry 0 (a) has no name and url" in now["why"]
    write(path, [{"name": n, "url": h.url} for n, h in made.items() if n != at])
    why = strict.refused("follow", same, int(LONG * 1000))
    assert why.startswith("ATTN_ENOTFOUND") and f"went with member {at}" in why
    where, _, rebuilt = worker.ask("decode", text, 3)
    assert where != at and rebuilt == "1"


def test_a_member_that_does_not_answer_takes_nothing(start, tmp_path):
    rng = random.Random(SEED)
    made, url = in_a_file(start, tmp_path / "members")
    worker, late = start.connected(url, probe_ms=100), start.connected(url, probe_ms=100)
    worker.place(prompt(rng, 40))
    made["b"].signal_daemon(signal.SIGSTOP)
    for _ in range(3):
        assert worker.place(prompt(rng, 40))[1] == late.place(prompt(rng, 40))[1] == "a"


def test_a_daemon_that_restarts_empty_has_its_sequences_made_anew(start, tmp_path):
    rng = random.Random(SEED)
    made, url = in_a_file(start, tmp_path / "members")
    worker = start.connected(url)
    texts = [worker.place(prompt(rng, 40)) for _ in range(4)]
    for number, *_ in texts:
        worker.ask("feed", number)
    lost = texts[0][1]
    mine = [(number, id) for number, member, _, id in texts if member == lost]
    assert 0 < len(mine) < 4
    # what a move may have left: a copy on the other daemon that lacks tokens
    with attnd.connect(made["ab".replace(lost, "")].url) as client:
        client.create_pool(SPEC).open(mine[0][1])
        made[lost].signal_daemon(signal.SIGKILL)
        made[lost].start_daemon()
        for i, (number, _) in enumerate(mine):
            assert worker.ask("decode", number, 3)[2] == str(i + 1)
    assert lost in [worker.place(prompt(rng, 40))[1] for _ in range(4)]
    worker.ask("together", 8)


def test_a_pool_is_made_on_a_daemon_whose_session_is_gone(start, tmp_path):
    rng = random.Random(SEED)
    host = start.host("a")
    host.start_daemon()
    write(tmp_path / "members", [{"name": "a", "url": host.url}])
    worker = start.connected(f"cluster+file://{tmp_path / 'members'}")
    worker.ask("feed", worker.place(prompt(rng, 40))[0])
    host.signal_daemon(signal.SIGKILL)
    host.start_daemon()
    worker.ask("pool", "q")  # of a name that the client has no handle of
    number, *_ = worker.place(prompt(rng, 40))
    worker.ask("feed", number)
    worker.ask("decode", number, 3)
    worker.ask("pool", "p")  # and the one that went with the session
    number, *_ = worker.place(prompt(rng, 40))
    worker.ask("feed", number)


def test_daemons_are_given_weights_those_that_come_later_too(start, tmp_path):
    rng, path = random.Random(SEED), tmp_path / "members"
    made, url = in_a_file(start, path)
    write(path, [{"name": "a", "url": made["a"].url}])
    worker = start.connected(url)
    worker.ask("heads")
    text, at, *_ = worker.place(prompt(rng, 60))
    worker.ask("feed", text)
    worker.ask("decode", text, 3)
    worker.ask("heads")  # again, to a pool that is there
    write(path, [{"name": n, "url": h.url} for n, h in made.items()])
    everybody(worker, "ab")
    made["a"].signal_daemon(signal.SIGKILL)
    write(path, [{"name": "b", "url": made["b"].url}])
    where, _, rebuilt = worker.ask("decode", text, 3)
    assert (at, where, rebuilt) == ("a", "b", "1")


def test_what_may_not_be_null_is_refused_by_name(start, tmp_path):
    _, url = in_a_file(start, tmp_path / "members")
    start.connected(url).ask("nulls")


@pytest.mark.parametrize(
    "url, why",
    [
        ("tcp://127.0.0.1:1", "ATTN_EINVAL: url is tcp://127.0.0.1:1"),
        ("cluster+k8s://attnd", "ATTN_ENOTSUP: url is cluster+k8s://attnd"),
        ("cluster+etcds://a:1", "ATTN_ENOTSUP: url is cluster+etcds://a:1"),
        ("cluster+etcd://a", "ATTN_EINVAL: url is cluster+etcd://a, expected"),
        ("cluster+etcd:///p", "ATTN_EINVAL: url is cluster+etcd:///p, expected"),
        ("cluster+etcd://a:1?ca=f", "ATTN_EINVAL: url is cluster+etcd://a:1?ca=f, expected"),
        ("cluster+file://a", "ATTN_EINVAL: url is cluster+file://a, expected"),
    ],
)
def test_a_registry_that_it_does_not_read_is_refused_by_name(start, url, why):
    assert start.worker(url).answer().startswith("error " + why)
