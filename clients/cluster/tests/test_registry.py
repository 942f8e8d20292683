"""The registry's interface, on a real etcd of one and three members, and on a file."""

import json
import os
import signal
import threading
import time

import pytest
from conftest import await_

from attnd_cluster.registry import (
    Deleted,
    Entry,
    LeaseGone,
    RegistryLost,
    open_registry,
)

T = 10.0  # seconds that a request may take


class Watch(threading.Thread):
    """Collects what a watch gives, and goes on as its users do when the registry is lost."""

    def __init__(self, registry, prefix, at, idle=0.5):
        super().__init__(daemon=True)
        self.registry, self.prefix, self.at, self.idle = registry, prefix, at, idle
        self.events, self.n_alive, self.n_lost, self.is_too_old = [], 0, 0, False
        self.ends = threading.Event()
        self.start()

    def run(self):
        while not self.ends.is_set() and not self.is_too_old:
            try:
                for changes in self.registry.watch(self.prefix, self.at, self.idle):
                    if changes is None:
                        self.is_too_old = True
                        break
                    self.at = changes.at
                    self.events += changes.events
                    self.n_alive += not changes.events
                    if self.ends.is_set():
                        break
            except RegistryLost:
                self.n_lost += 1
                time.sleep(0.05)

    def stop(self):
        self.ends.set()
        self.join()


@pytest.fixture
def registry(etcd1):
    r = open_registry(etcd1.url)
    yield r
    r.close()


@pytest.mark.parametrize(
    "url, named",
    [
        ("zk://a:1", "zk://a:1"),
        ("etcd://", "HOST:PORT"),
        ("etcd://a", "HOST:PORT"),
        ("etcd://a:1/x?ca=f", "ca"),
        ("etcds://a:1/x?cert=f&kye=g", "kye"),
        ("etcd", "etcd"),
    ],
)
def test_a_wrong_url_is_named(url, named):
    with pytest.raises(ValueError, match="registry is") as e:
        open_registry(url)
    assert named in str(e.value)


def test_keys_are_put_listed_created_once_and_deleted(registry):
    assert registry.list("", T).entries == {}
    registry.put("members/a", b"1", None, T)
    registry.put("members/a", b"\x00\xff", None, T)
    registry.put("memberships", b"not below it", None, T)
    assert registry.create("members/b", b"2", None, T)
    assert not registry.create("members/b", b"3", None, T)
    assert registry.list("members/", T).entries == {"members/a": b"\x00\xff", "members/b": b"2"}
    registry.delete("members/a", T)
    registry.delete("members/a", T)
    assert registry.list("members/", T).entries == {"members/b": b"2"}


def test_a_lease_that_is_kept_keeps_its_keys_and_one_that_is_not_loses_them(registry):
    kept, left = registry.grant(2, T), registry.grant(2, T)
    registry.put("members/kept", b"1", kept, T)
    registry.put("members/left", b"2", left, T)

    def left_is_gone():
        kept.keep(T)
        return "members/left" not in registry.list("members/", T).entries

    await_("the end of a lease", left_is_gone)
    assert list(registry.list("members/", T).entries) == ["members/kept"]
    with pytest.raises(LeaseGone):
        left.keep(T)
    with pytest.raises(LeaseGone):
        registry.put("members/left", b"3", left, T)
    left.end(T)  # of one that is gone is no error
    kept.end(T)
    assert registry.list("members/", T).entries == {}


def test_a_write_that_depends_on_another_key_is_none_once_that_has_changed(registry):
    lease = registry.grant(60, T)
    held = "incarnations/a", b"r1"
    with pytest.raises(LeaseGone, match="incarnations/a"):
        registry.put("members/a", b"0", lease, T, held)
    registry.put(*held, None, T)
    registry.put("members/a", b"1", lease, T, held)
    registry.put("incarnations/a", b"r2", None, T)
    with pytest.raises(LeaseGone, match="incarnations/a"):
        registry.put("members/a", b"2", lease, T, held)
    assert registry.list("members/", T).entries == {"members/a": b"1"}
    lease.end(T)
    assert registry.list("members/", T).entries == {}


def test_a_watch_gives_all_that_happened_behind_a_list_in_order(registry):
    registry.put("members/old", b"0", None, T)
    at = registry.list("members/", T).at
    registry.put("members/a", b"1", None, T)  # before the watch is there
    watch = Watch(registry, "members/", at)
    lease = registry.grant(1, T)
    registry.put("other/x", b"1", None, T)
    registry.put("members/b", b"2", lease, T)
    want = [Entry("members/a", b"1"), Entry("members/b", b"2"), Deleted("members/b")]
    await_("the lease's end", lambda: len(watch.events) >= 3)
    await_("a word that nothing happens", lambda: watch.n_alive >= 3)
    watch.stop()
    assert watch.events == want and watch.n_lost == 0


def test_a_watch_from_before_a_compaction_says_so(registry):
    at = registry.list("members/", T).at
    for i in range(5):
        registry.put("members/a", b"%d" % i, None, T)
    now = registry.list("members/", T).at
    registry._ask("kv/compaction", {"revision": now, "physical": True}, T)
    watch = Watch(registry, "members/", at)
    await_("its end", lambda: watch.is_too_old)
    assert watch.events == []


def test_a_stopped_registry_is_lost_within_the_timeout_and_comes_back(etcd1, registry):
    registry.put("members/a", b"1", None, T)
    watch = Watch(registry, "members/", registry.list("members/", T).at)
    await_("the watch", lambda: watch.n_alive)
    etcd1.signal(0, signal.SIGSTOP)
    with pytest.raises(RegistryLost):
        registry.put("members/a", b"2", None, 0.5)
    await_("that the watch notices", lambda: watch.n_lost)
    etcd1.signal(0, signal.SIGCONT)
    registry.put("members/b", b"3", None, T)
    await_("what happened since", lambda: Entry("members/b", b"3") in watch.events)
    watch.stop()
    assert Deleted("members/a") not in watch.events


def test_a_leader_that_is_killed_or_stopped_loses_no_event(etcd3):
    registry = open_registry(etcd3.url)
    watch = Watch(registry, "members/", registry.list("members/", T).at)
    n = 0

    def write():
        nonlocal n
        try:
            registry.put(f"members/{n}", b"x", None, 2.0)
        except RegistryLost:
            return False
        n += 1
        return True

    for number in (signal.SIGKILL, signal.SIGSTOP):
        for _ in range(3):
            await_("a write", write)
        leader = etcd3.leader()
        etcd3.signal(leader, number)
        for _ in range(3):
            await_("a write without the leader", write)
        if number == signal.SIGKILL:
            etcd3.start(leader)
        else:
            etcd3.signal(leader, signal.SIGCONT)
        etcd3.await_ready()
    keys = [f"members/{i}" for i in range(n)]
    await_("every event", lambda: {e.key for e in watch.events} >= set(keys))
    watch.stop()
    seen = list(dict.fromkeys(e.key for e in watch.events))
    assert seen == keys
    registry.close()


def test_without_a_majority_nothing_is_written_read_or_gone(etcd3):
    registry = open_registry(etcd3.url)
    lease = registry.grant(2, T)
    registry.put("members/a", b"1", lease, T)
    watch = Watch(registry, "members/", registry.list("members/", T).at)
    for i in (0, 1):
        etcd3.signal(i, signal.SIGKILL)
    await_("that the watch notices", lambda: watch.n_lost)
    with pytest.raises(RegistryLost):
        registry.list("members/", 1.5)

    def cannot_be_renewed():  # a leader without followers still does for a moment
        try:
            lease.keep(1.5)
        except RegistryLost:
            return True

    await_("the leader's end", cannot_be_renewed)
    time.sleep(2.5)  # longer than the lease: that nobody is declared dead is what is tested
    assert watch.events == []
    for i in (0, 1):
        etcd3.start(i)

    def renewed():
        try:
            lease.keep(2.0)
            return True
        except RegistryLost:
            return False

    await_("a renewal: the election has extended the lease", renewed)
    assert registry.list("members/", T).entries == {"members/a": b"1"}
    watch.stop()
    assert watch.events == []
    registry.close()


def test_a_file_lists_members_and_a_new_one_in_its_place_is_seen(tmp_path):
    path = tmp_path / "cluster.json"

    def write(*members):
        new = tmp_path / "new"
        new.write_text(
            json.dumps({"members": [{"name": n, "url": f"tcp://{n}:1"} for n in members]})
        )
        os.replace(new, path)

    write("a", "b")
    registry = open_registry(f"file://{path}")
    assert registry.is_static
    first = registry.list("members/", T)
    assert sorted(first.entries) == ["members/a", "members/b"]
    watch = Watch(registry, "members/", first.at, idle=0.01)
    await_("the watch", lambda: watch.n_alive)
    write("b", "c")
    await_("both changes", lambda: len(watch.events) >= 2)
    path.write_text("{")  # a file that is wrong changes nothing
    await_("that the watch notices", lambda: watch.n_lost)
    watch.stop()
    assert [e.key for e in watch.events] == ["members/a", "members/c"]
    assert isinstance(watch.events[0], Deleted)
    with pytest.raises(NotImplementedError, match="written by people"):
        registry.grant(1, T)


@pytest.mark.parametrize(
    "text, named",
    [
        ("{}", "'members' is missing"),
        ('{"members": [{"name": "a"}]}', "'url' is missing"),
        (
            '{"members": [{"name": "a", "url": "u"}, {"name": "a", "url": "v"}]}',
            "two are named 'a'",
        ),
        ('{"members": [{"name": 1, "url": "u"}]}', "texts"),
        ("[", "cluster.json"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path, text, named):
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(RegistryLost, match=named):
        open_registry(f"file://{path}").list("members/", T)
