"""The registry on Kubernetes' Leases, against a fake API server: no real Kubernetes has run these."""

import signal
import time


import pytest
from conftest import await_
from ledger import Text, rebuild
from rig import SPEC, Host

pytest.importorskip("kubernetes", reason="python3-kubernetes is not installed")

import attnd_cluster  # noqa: E402
from apiserver import ApiServer  # noqa: E402
from test_registry import T, Watch  # noqa: E402

from attnd_cluster.registry import (
    Deleted,
    Entry,
    LeaseGone,
    RegistryLost,
    open_registry,
)  # noqa: E402


@pytest.fixture
def server():
    s = ApiServer()
    yield s
    s.close()


@pytest.fixture
def url(server, tmp_path):
    server.write_kubeconfig(tmp_path / "kubeconfig")
    return f"k8s://ns/t?kubeconfig={tmp_path / 'kubeconfig'}"


@pytest.fixture
def registry(url):
    r = open_registry(url)
    yield r
    r.close()


@pytest.mark.parametrize(
    "wrong",
    ["k8s://", "k8s://NS", "k8s://ns/A", "k8s://ns?config=x", "k8s://ns?kubeconfig=/nowhere"],
)
def test_a_wrong_url_is_named(wrong):
    with pytest.raises(ValueError, match="registry is"):
        open_registry(wrong)


def test_keys_are_put_listed_created_once_and_deleted(registry):
    registry.put("members/A_1", b"1", None, T)
    registry.put("members/A_1", b"\x00\xff", None, T)
    registry.put("memberships", b"not below it", None, T)
    assert registry.create("members/b", b"2", None, T)
    assert not registry.create("members/b", b"3", None, T)
    assert registry.list("members/", T).entries == {"members/A_1": b"\x00\xff", "members/b": b"2"}
    registry.delete("members/A_1", T)
    registry.delete("members/A_1", T)
    assert registry.list("members/", T).entries == {"members/b": b"2"}


def test_a_write_that_depends_on_another_key_is_none_once_that_has_changed(registry, url):
    lease, held = registry.grant(60, T), ("incarnations/a", b"r1")
    with pytest.raises(LeaseGone, match="incarnations/a"):
        registry.put("members/a", b"0", lease, T, held)
    registry.put(*held, None, T)
    registry.put("members/a", b"1", lease, T, held)
    check, other = registry._check, open_registry(url)

    def late(*of):  # another comes between the look and the write
        check(*of)
        registry._check = check
        other.put("incarnations/a", b"r2", None, T)
        other.put("members/a", b"3", None, T, ("incarnations/a", b"r2"))

    registry._check = late
    with pytest.raises(LeaseGone, match="incarnations/a"):
        registry.put("members/a", b"2", lease, T, held)
    assert registry.list("members/", T).entries == {"members/a": b"3"}
    other.close()


def test_who_watches_ends_leases_that_are_not_kept_and_only_those(registry, url):
    kept, left = registry.grant(2, T), registry.grant(2, T)
    registry.put("members/kept", b"1", kept, T)
    registry.put("members/left", b"2", left, T)
    others = [open_registry(url) for _ in range(3)]  # they race to delete it
    watches = [Watch(r, "members/", r.list("members/", T).at) for r in others]

    def left_is_gone():
        kept.keep(T)
        return all(Deleted("members/left") in w.events for w in watches)

    await_("the end of a lease", left_is_gone)
    seen = [list(w.events) for w in watches]
    with pytest.raises(LeaseGone):
        left.keep(T)
    with pytest.raises(LeaseGone):
        registry.put("members/left", b"3", left, T)
    left.end(T)
    for events in seen:
        assert [e for e in events if isinstance(e, Deleted)] == [Deleted("members/left")]
        assert events.count(Entry("members/kept", b"1")) <= 1  # renewals say nothing new
    for w in watches:
        w.stop()
    kept.end(T)
    assert registry.list("members/", T).entries == {}
    for r in others:
        r.close()


def test_a_role_is_one_holder_s_until_its_lease_was_not_kept(registry, url):
    other = open_registry(url)
    mine, its = registry.grant(1, T), other.grant(1, T)
    assert registry.create("roles/controller", b"me", mine, T)
    for _ in range(20):
        mine.keep(T)
        assert not other.create("roles/controller", b"it", its, T)
        time.sleep(0.1)  # together longer than the lease, which is kept
    await_("the role", lambda: other.create("roles/controller", b"it", its, T))
    with pytest.raises(LeaseGone):
        mine_again = registry.grant(1, T)
        mine_again.keys = ["roles/gone"]
        mine_again.keep(T)
    assert registry.list("roles/", T).entries == {"roles/controller": b"it"}
    other.close()


def test_a_watch_from_a_version_that_is_too_old_says_so(registry, server):
    at = registry.list("members/", T).at
    registry.put("members/a", b"1", None, T)
    server.compact()
    registry.put("members/a", b"2", None, T)
    watch = Watch(registry, "members/", at)
    await_("its end", lambda: watch.is_too_old)
    watch = Watch(registry, "members/", registry.list("members/", T).at)
    registry.put("members/a", b"3", None, T)
    await_("what is new", lambda: watch.events == [Entry("members/a", b"3")])
    watch.stop()


def test_an_api_server_that_is_away_is_lost_within_the_timeout_and_ends_nothing(registry, server):
    lease = registry.grant(4, T)
    registry.put("members/a", b"1", lease, T)
    watch = Watch(registry, "members/", registry.list("members/", T).at)
    await_("the watch", lambda: watch.n_alive)
    lease.keep(T)
    server.stop()
    with pytest.raises(RegistryLost):
        registry.put("members/b", b"2", None, 0.3)
    await_("that the watch notices", lambda: watch.n_lost)
    time.sleep(4.5)  # more than the lease: that it ends nothing is what is tested
    server.go_on()
    lease.keep(T)
    assert Deleted("members/a") not in watch.events
    registry.put("members/b", b"3", None, T)
    await_("what happened since", lambda: Entry("members/b", b"3") in watch.events)
    watch.stop()


def test_daemons_register_serve_and_are_lost_there_too(tmp_path, url):
    hosts = [Host(tmp_path, n, url, ttl=4) for n in "ab"]
    try:
        for host in hosts:
            host.start()
        with attnd_cluster.connect(
            f"cluster+{url}", rebuild=rebuild, timeout=600, idle=1
        ) as client:
            assert client.members.wait(300, lambda now: len(now) == 2)
            pool = client.create_pool(SPEC)
            texts = [Text(pool, range(i, i + 40)) for i in range(4)]
            assert {t.seq.where for t in texts} == {"a", "b"}
            hosts[0].signal_agent(signal.SIGKILL)
            hosts[0].signal_daemon(signal.SIGKILL)
            for t in texts:
                t.decode(2)
                assert t.seq.where == "b"
                t.verify()
    finally:
        for host in hosts:
            host.close()
