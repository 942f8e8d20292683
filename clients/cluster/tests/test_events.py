"""Block events: what a subscriber of vLLM's KV events knows is what the daemon's open finds, whatever
comes, goes, is lost, killed or begun anew."""

import json
import os
import random
import signal
import subprocess
import sys

import attnd
import numpy as np
import pytest
from conftest import HERE, await_
from rig import Host

pytest.importorskip("zmq")
pytest.importorskip("msgpack")
from kv_subscriber import Subscriber, decode_map  # noqa: E402

from attnd_cluster.blocks import Follower, PoolBlocks  # noqa: E402
from attnd_cluster.events import (  # noqa: E402
    Events,
    Target,
    cleared,
    parse_target,
    removed,
    stored,
)

SPEC = attnd.PoolSpec(
    "p", num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim_k=8, q_dtype="f32", n_blocks=24
)
SIZE = 16
TOPIC = "kv@host@p"


# ---- the index, of made-up daemons


class MadeUp:
    """Publishes and evicts at random, on two cards; answers as inspect does, a few rows a page."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.number, self.first = [1000, 5000], [1000, 5000]
        self.events = [[], []]
        self.all = [{}, {}]  # (serial, block) -> row
        self.serial = 0
        self.n_changes_in_pages = 0
        self.is_quiet = False

    def _say(self, card, event):
        self.number[card] += 1
        self.events[card].append(event)
        while len(self.events[card]) > 40:
            self.events[card].pop(0)
            self.first[card] += 1

    def change(self):
        card, rows = self.random.choice([0, 0, 1]), None
        rows = self.all[card]
        if rows and self.random.random() < 0.45:
            serial, block = self.random.choice(sorted(rows))
            del rows[serial, block]
            self._say(card, {"event": "evicted", "serial": serial, "block": block})
            return
        parents = [None, *sorted({s: r for (s, _), r in rows.items()}.items())]
        parent = self.random.choice(parents)
        self.serial += 1
        row = {
            "pool": (
                self.random.choice(["p", "p", "p", "q"]) if parent is None else parent[1]["pool"]
            ),
            "serial": self.serial,
            "block": self.random.randrange(100),
            "parent": 0 if parent is None else parent[0],
            "place": 0 if parent is None else parent[1]["place"] + 1,
            "ids": f"{self.random.randrange(3):08x}" * 4,  # few, so that equal ones meet
        }
        if parent is None and self.random.random() < 0.3:
            row["adapter"] = str(2**64 - 1)
        elif parent is not None and "adapter" in parent[1]:
            row["adapter"] = parent[1]["adapter"]
        rows[self.serial, row["block"]] = row
        self._say(card, {"event": "published", **row})
        if self.random.random() < 0.1:  # it moves
            to = {**row, "block": row["block"] + 100}
            rows[self.serial, to["block"]] = to
            self._say(card, {"event": "published", **to})
            del rows[self.serial, row["block"]]
            self._say(card, {"event": "evicted", "serial": self.serial, "block": row["block"]})

    def begin_empty(self):
        self.all, self.events, self.serial = [{}, {}], [[], []], 0
        self.number = [n + 1000 for n in self.number]
        self.first = list(self.number)

    def inspect(self, topic, after):
        if not self.is_quiet and self.random.random() < 0.3:
            self.change()
            self.n_changes_in_pages += 1
        card, at = after >> 56, after & (1 << 56) - 1
        if topic == "blocks":
            rows = [self.all[card][k] for k in sorted(self.all[card], key=lambda k: (k[1], k[0]))]
            rows = [r for r in rows if r["block"] >= at][:5]
            next_ = card << 56 | (rows[-1]["block"] + 1) if rows else (card + 1) << 56
            if not rows and card == 1:
                next_ = 0
            here = [r for r in self.all[card].values() if rows and r["block"] == rows[-1]["block"]]
            rows += [r for r in here if r not in rows]
            return {
                "blocks": rows,
                "card": card,
                "next": next_,
                "number": card << 56 | self.number[card],
            }
        assert topic == "block_events"
        if not self.first[card] <= at <= self.number[card]:
            return {"block_events": [], "next": after, "behind": True, "more": False}
        got = []
        for e in self.events[card][at - self.first[card] :][:7]:
            if e["event"] == "published" and (e["serial"], e["block"]) not in self.all[card]:
                e = {k: e[k] for k in ("event", "serial", "block")}
            got.append(e)
        next_ = at + len(got)
        return {
            "block_events": got,
            "next": card << 56 | next_,
            "behind": False,
            "more": next_ < self.number[card],
        }

    def found(self, pool):
        """What open finds: chains of contents from the first block on."""
        chains = set()
        for rows in self.all:
            by_serial = {serial: row for (serial, _), row in rows.items()}
            for row in by_serial.values():
                chain = []
                while row is not None:
                    chain.insert(0, (row.get("adapter"), row["ids"]))
                    if row["parent"] == 0:
                        break
                    row = by_serial.get(row["parent"])
                if row is not None and row["pool"] == pool:
                    chains.add(tuple(chain))
        return chains


@pytest.mark.parametrize("seed", range(8))
def test_what_is_told_leads_to_what_open_finds(seed):
    made = MadeUp(seed)
    pools = {"p": PoolBlocks(), "q": PoolBlocks()}
    follower = Follower(made.inspect, pools)
    told = {name: {} for name in pools}  # as a reader of the changes has it
    sizes = []
    for turn in range(400):
        for _ in range(made.random.choice([0, 1, 3, 60])):
            made.change()
        if turn % 100 == 99:
            made.begin_empty()
        follower.turn()
        made.is_quiet = True  # nothing changes at the end
        follower.turn()
        made.is_quiet = False
        for name, pool in pools.items():
            change = pool.changes()
            for k in change.removed:
                assert not any(o.parent == k.hash for o in told[name].values())
                del told[name][k.hash]
            for k in change.stored:
                assert k.hash not in told[name] and (k.parent == 0 or k.parent in told[name])
                told[name][k.hash] = k
            assert told[name] == pool.told
            chains = set()
            for k in told[name].values():
                chain, at = [], k
                while at is not None:
                    chain.insert(0, (str(at.adapter) if at.adapter else None, at.ids.hex()))
                    at = told[name].get(at.parent)
                chains.add(tuple(chain))
            assert chains == made.found(name) and len(chains) == len(told[name])
            sizes.append(len(chains))
    assert follower.n_snapshots > 50 and follower.n_events > 500 and max(sizes) > 5
    assert made.n_changes_in_pages > 100


def test_blocks_that_follow_each_other_are_one_event():
    pool = PoolBlocks()
    for i in range(150):
        row = {"serial": i + 1, "block": i, "parent": i, "place": i, "ids": f"{i:08x}" * 2}
        pool.publish(0, row)
    pool.publish(0, {"serial": 500, "block": 500, "parent": 2, "place": 2, "ids": "00000009" * 2})
    change = pool.changes()
    events = stored(change.stored)
    sizes = sorted(len(e["block_hashes"]) for e in events)
    assert sum(sizes) == 151 and len(events) <= 4 and max(sizes) == 64
    assert all(e["block_size"] == 2 for e in events)
    assert [len(e["block_hashes"]) for e in removed(change.stored)] == [64, 64, 23]
    assert cleared() == {"type": "AllBlocksCleared"}


def test_targets_are_read_and_wrong_ones_named():
    assert parse_target("a/p=tcp://*:5557") == Target("a/p", "tcp://*:5557", "", "")
    assert parse_target("p=tcp://*:1,,kv@a@b,c") == Target("p", "tcp://*:1", "", "kv@a@b,c")
    assert parse_target("p=ipc://a,ipc://b,t") == Target("p", "ipc://a", "ipc://b", "t")
    for wrong in ("", "p", "p=", "=tcp://*:1", "p=nowhere", "p=tcp://*:1,nowhere"):
        with pytest.raises(ValueError, match="POOL=PUB"):
            parse_target(wrong)
    with pytest.raises(ValueError, match="one PUB"):
        Events([parse_target("p=ipc://a"), parse_target("p=ipc://b")], lambda *_: {})


# ---- with a daemon


class Rig:
    def __init__(self, tmp_path, pool="p", ip=None, **start):
        (tmp_path / "members.json").write_text('{"members": []}')
        self.host = Host(tmp_path, "a", f"file://{tmp_path}/members.json", ttl=5, ip=ip)
        self.pool_name = pool
        base = f"/tmp/{tmp_path.name[:8]}{os.getpid()}"
        self.paths = [f"{base}.pub", f"{base}.rep"]
        self.pub, self.replay = (f"ipc://{p}" for p in self.paths)
        self.host.start_daemon(*start.pop("settings", ()), **start)
        self.start_agent()
        self.client = attnd.connect(self.host.url, token_file=self.host.key_file)
        self.pool = self.client.create_pool(SPEC)
        self.subscribers = []

    def start_agent(self):
        self.host.start_agent("--events", f"{self.pool_name}={self.pub},{self.replay},{TOPIC}")
        self.host.await_agent()

    def subscribe(self):
        s = Subscriber(self.pub, self.replay, TOPIC)
        self.subscribers.append(s)
        s.replay(0)
        return s

    def compute(self, tokens, adapter=0):
        """A prompt is computed and given up."""
        seq = self.pool.open(tokens=tokens, adapter=adapter)
        n = len(tokens) - seq.n_cached
        kv = np.random.default_rng(len(tokens)).standard_normal((n, 1, 8)).astype("f4")
        self.pool.step(0, [(seq, seq.n_cached, n)], k=kv, v=kv)
        seq.close()

    def agrees(self, subscriber, prompts):
        """Whether it knows of all prompts what open would find, once it has read what came."""
        while subscriber.read(0):
            pass
        return all(
            subscriber.cached(t, a, SIZE) == self.pool.probe(t, adapter=a).cached_tokens
            for t, a in prompts
        )

    def await_agreement(self, subscriber, prompts):
        def is_known():
            subscriber.read(10)
            return self.agrees(subscriber, prompts)

        await_("what is known", is_known)

    def await_read(self, what, subscriber, condition):
        def is_so():
            subscriber.read()
            return condition()

        await_(what, is_so)

    def close(self):
        self.client.close()
        for s in self.subscribers:
            s.close()
        self.host.close()
        for p in self.paths:
            if os.path.exists(p):
                os.unlink(p)


@pytest.fixture
def rig(tmp_path):
    made = []

    def make(**start):
        made.append(Rig(tmp_path, **start))
        return made[-1]

    yield make
    for r in made:
        r.close()


def prompts_of(seed, n=30):
    """Some share their beginnings."""
    r = random.Random(seed)
    made = []
    for _ in range(n):
        head, adapter = r.randrange(4), r.choice([0, 0, 0, 7, 2**64 - 1])
        length = r.randrange(SIZE, 6 * SIZE)
        body = r.randrange(1000)
        made.append(([head] * SIZE * 2 + [2**32 - 1 - body - i for i in range(length)], adapter))
    return made


def test_a_subscriber_knows_what_open_finds_also_of_lost_messages_and_late(rig):
    r = rig()
    s, prompts = r.subscribe(), prompts_of(1)
    for i, (tokens, adapter) in enumerate(prompts):  # more than the pool has: some are evicted
        r.compute(tokens, adapter)
        if i % 7 == 3:
            r.await_agreement(s, prompts)
        if i == 17:
            s.lose = 2
            r.compute([1000] * 2 * SIZE)
            r.await_read("messages to lose", s, lambda: s.n_lost == 2)
    r.await_agreement(s, prompts)
    assert any(s.cached(t, a) for t, a in prompts) and len(s.index) <= 24
    assert s.n_lost == 2 and s.n_replays >= 2
    late = r.subscribe()  # asks from 0 and gets all that there is
    r.await_agreement(late, prompts)
    assert late.index == s.index
    page = r.host.get("/metrics")[1]
    assert f"attnd_agent_blocks {len(s.index)}\n" in page
    assert "attnd_agent_block_snapshots_total 1\n" in page


def test_an_agent_that_follows_says_all_anew_and_one_that_leaves_clears(rig):
    r = rig()
    s, prompts = r.subscribe(), prompts_of(2, 8)
    for tokens, adapter in prompts:
        r.compute(tokens, adapter)
    r.await_agreement(s, prompts)
    before, last = dict(s.index), s.last
    r.host.signal_agent(signal.SIGKILL)
    r.start_agent()
    n_cleared = s.n_cleared
    r.await_read("the new one's messages", s, lambda: s.n_cleared > n_cleared)
    r.await_agreement(s, prompts)
    assert s.index == before and s.last > last
    r.host.signal_agent(signal.SIGTERM)
    r.await_read("an empty index", s, lambda: not s.index)
    assert r.host.agent.wait(60) == 0


def test_a_daemon_that_is_killed_keeps_its_blocks_under_a_keeper_and_loses_them_without(rig):
    r = rig(supervised=True)
    s, prompts = r.subscribe(), prompts_of(3, 8)
    for tokens, adapter in prompts:
        r.compute(tokens, adapter)
    r.await_agreement(s, prompts)
    before, n_cleared, n_removed = dict(s.index), s.n_cleared, s.n_removed
    boot = r.client.info.boot_id
    children = subprocess.run(
        ["pgrep", "-P", str(r.host.daemon.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)

    def is_back():
        with attnd.connect(r.host.url) as c:
            return c.info.boot_id != boot

    await_("a successor", is_back)
    await_(
        "a snapshot",
        lambda: "attnd_agent_block_snapshots_total 2\n" in r.host.get("/metrics")[1],
    )
    r.await_agreement(s, prompts)  # the same blocks, and none was said to be gone meanwhile
    assert s.index == before and (s.n_cleared, s.n_removed) == (n_cleared, n_removed)
    r.compute([5] * 3 * SIZE)
    r.await_agreement(s, [*prompts, ([5] * 3 * SIZE, 0)])
    assert s.cached([5] * 3 * SIZE) == 2 * SIZE

    r.host.signal_daemon(signal.SIGKILL)
    r.client.close()
    r.host.start_daemon()
    r.client = attnd.connect(r.host.url)
    r.pool = r.client.create_pool(SPEC)
    r.await_read("that nothing is there", s, lambda: not s.index)
    for tokens, adapter in prompts[4:]:  # serials begin anew, with other contents
        r.compute(tokens, adapter)
    r.await_agreement(s, prompts)
    assert s.index and s.n_cleared == n_cleared


def test_blocks_of_all_cards_are_known_and_a_prompt_that_two_have_once(rig):
    r = rig(settings=("--device.index", "0,1"))
    s, prompts = r.subscribe(), prompts_of(5)
    seqs = [r.pool.open(tokens=t, adapter=a) for t, a in prompts]  # before anybody has computed it
    for seq, (tokens, _) in zip(seqs, prompts):
        kv = np.ones((len(tokens), 1, 8), "f4")
        try:
            r.pool.step(0, [(seq, 0, len(tokens))], k=kv, v=kv)
        except attnd.AttndError as e:  # the card is full
            assert "blocks" in str(e)
        seq.close()
    r.await_agreement(s, prompts)
    with attnd.connect(f"ipc://{r.host.socket}") as c:
        found, after, cards = set(), 0, set()
        while True:
            page = c.inspect("blocks", after)
            found |= {(page["card"], b["serial"]) for b in page["blocks"]}
            cards.add(page["card"])
            after = page["next"]
            if after == 0:
                break
    assert cards == {0, 1} and len({c for c, _ in found}) == 2
    assert 24 < len(s.index) <= len(found)


def test_a_tenants_pool_is_named_with_it(rig):
    r = rig(pool="t/p", ip="127.0.0.1")
    s, prompts = r.subscribe(), prompts_of(6, 4)
    for tokens, adapter in prompts:
        r.compute(tokens, adapter)
    r.await_agreement(s, prompts)
    assert s.index


def test_vllms_own_classes_read_it(rig):
    python = os.environ.get("ATTN_VLLM_PYTHON")
    if python is None:
        pytest.skip("ATTN_VLLM_PYTHON names no Python with vLLM")
    r = rig()
    s, prompts = r.subscribe(), prompts_of(4, 12)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with subprocess.Popen(
        [python, "-B", str(HERE / "kv_subscriber.py"), r.pub, r.replay, TOPIC],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    ) as other:
        assert other.stdout.readline() == "ready\n"
        for tokens, adapter in prompts:
            r.compute(tokens, adapter)
        r.await_agreement(s, prompts)
        want = json.dumps(sorted((h, *c) for h, c in s.index.items())) + "\n"
        got = None
        while got != want:  # a line for each message, and those without events go on coming
            got = other.stdout.readline()
            assert got, "it ended"
        other.stdin.close()
        other.stdout.read()
        assert other.wait(60) == 0
    assert len(json.loads(got)) > 5


def test_without_pyzmq_the_agent_says_what_is_missing(tmp_path):
    (tmp_path / "zmq.py").write_text("raise ImportError('no zmq here')\n")
    (tmp_path / "members.json").write_text('{"members": []}')
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    command = [sys.executable, "-B", "-m", "attnd_cluster.agent", "--url", "tcp://127.0.0.1:1"]
    command += ["--registry", f"file://{tmp_path}/members.json", "--http", "127.0.0.1:0"]
    command += ["--events", "p=ipc:///tmp/none.pub"]
    got = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert got.returncode == 78 and "pyzmq" in got.stderr


def test_a_decoder_of_the_tests_refuses_what_is_not_vllms():
    import msgpack

    for wrong in ({"type": "BlockStored"}, {"type": "AllBlocksCleared", "x": 1}):
        with pytest.raises(AssertionError):
            decode_map(msgpack.packb([1.0, [wrong], 0]))
