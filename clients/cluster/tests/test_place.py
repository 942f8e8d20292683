"""Which daemon a prompt goes to: pure functions, then clients that know nothing of each other, over real daemons."""

import collections
import json
import random
import threading

import pytest
from ledger import L, rows
from rig import SPEC, Host

import attnd_cluster
from attnd_cluster.place import Backlog, Candidate, homes, is_behind, order


def candidate(name, cached=0, free=1000, queue=0.0, backlog=0.0):
    return Candidate(name, cached, 1000, free, queue, backlog)


def test_a_prompt_goes_where_its_beginning_is_unless_that_is_far_behind():
    def best(*candidates, n=1000):
        return order(candidates, n, 16)[0].name

    assert best(candidate("a"), candidate("b", cached=800)) == "b"
    assert best(candidate("a"), candidate("b", cached=800, backlog=10_000)) == "a"
    assert best(candidate("a"), candidate("b", cached=800, queue=1.0)) == "a"
    assert best(candidate("a"), candidate("b", cached=800, free=3)) == "a"
    assert best(candidate("a", free=500), candidate("b")) == "b"
    assert [c.name for c in order([candidate("a", free=1), candidate("b", free=2)], 1000, 16)] == [
        "b",
        "a",
    ]


def test_a_prompt_has_the_homes_of_its_beginnings_for_whoever_asks():
    names = [f"d{i}" for i in range(16)]
    ids = list(range(1000))
    found = homes(names, ids, 0, 16, 4)
    assert len(set(found)) == 4 and found == homes(names[::-1], ids, 0, 16, 4)
    assert set(found) <= set(homes(names, ids + ids, 0, 16, 6))  # also of what goes on from there
    short = homes(names, ids[:20], 0, 16, 4)  # of one beginning
    assert len(set(short)) == 4 and short == homes(names, ids[:31], 0, 16, 4)
    assert set(homes(names, ids[:512] + [7] * 488, 0, 16, 4)) == set(found)
    assert homes(names, ids, 1, 16, 4) != found != homes(names, [7] * 1000, 0, 16, 4)
    assert homes(names, ids[:15], 0, 16, 4) == [] and homes([], ids, 0, 16, 4) == []


def test_homes_are_even_and_a_daemon_that_goes_takes_only_its_own():
    names = [f"d{i}" for i in range(16)]
    before = [homes(names, [i] * 16, 0, 16, 1) for i in range(2000)]
    counts = collections.Counter(n for (n,) in before)
    assert len(counts) == 16 and max(counts.values()) < 2 * 2000 / 16
    for i, (was,) in enumerate(before):
        if was != "d3":
            assert homes([n for n in names if n != "d3"], [i] * 16, 0, 16, 1) == [was]


def test_others_are_asked_where_more_is_ahead_than_the_prompt():
    def behind(*candidates):
        return is_behind(candidates, 1000, 16)

    assert behind() and behind(candidate("a", free=3))
    assert not behind(candidate("a")) and not behind(candidate("a", cached=990, queue=0.09))
    assert behind(candidate("a", cached=990, queue=0.11))
    assert not behind(candidate("a", queue=0.11), candidate("b", backlog=500))


def test_backlog_is_of_what_was_given_lately():
    backlog = Backlog()
    for _ in range(1000):
        backlog.give("a", 100, 0)
    assert 6000 < backlog.of("a") < 6500 and backlog.of("b") == 0
    for _ in range(300):
        backlog.give("b", 100, 0)
    assert backlog.of("a") < 100


def test_each_sequence_counts_as_a_mean_prompt_though_all_of_it_is_cached():
    backlog = Backlog()
    for _ in range(1000):
        backlog.give("a", 1, 500)
    assert 64 * 495 < backlog.of("a") < 64 * 505  # as WINDOW prompts
    cached, other = candidate("a", cached=999, backlog=backlog.of("a")), candidate("b")
    assert order([cached, other], 1000, 16)[0] is other  # a prompt's worth behind: made elsewhere, too
    assert order([candidate("a", cached=999, backlog=500), other], 1000, 16)[0].name == "a"


@pytest.fixture
def clients(tmp_path):
    """Three clients of six daemons."""
    hosts = [Host(tmp_path, f"d{i}", "unused") for i in range(6)]
    made = []
    try:
        for host in hosts:
            host.start_daemon()
        members = [{"name": h.name, "url": h.url} for h in hosts]
        (tmp_path / "members.json").write_text(json.dumps({"members": members}))
        for _ in range(3):
            made.append(attnd_cluster.connect(f"cluster+file://{tmp_path}/members.json", timeout=300.0))
            assert made[-1].members.wait(60, lambda now: len(now) == 6)
        yield made
    finally:
        for client in made:
            client.close()
        for host in hosts:
            host.close()


def test_what_one_client_has_begun_others_find(clients):
    prompts = [[(n + 1) * 101 + 7 * i for i in range(300)] for n in range(20)]
    where, n_found, n_known = set(), 0, 0
    for turn, client in enumerate(clients):
        pool = client.create_pool(SPEC)
        for n, ids in random.sample(list(enumerate(prompts)), len(prompts)):
            with pool.open(tokens=ids) as seq:
                if turn > 0:
                    n_found += seq.n_cached
                    n_known += (len(ids) - 20) // 16 * 16
                for layer in range(L):
                    _, k, v = rows(layer, ids[seq.n_cached :], seq.n_cached)
                    pool.step(layer, [(seq, seq.n_cached, len(k))], k=k, v=v)
                where.add(seq.where)
            ids += [n + 31 * turn + i for i in range(20)]
    assert len(where) > 2 and n_found > 0.9 * n_known, (n_found, n_known)


def test_homes_are_asked_at_once(clients, monkeypatch):
    pool = clients[0].create_pool(SPEC)
    together, at = threading.Barrier(4), pool.at

    def and_wait(*what):
        together.wait(300)
        return at(*what)

    monkeypatch.setattr(pool, "at", and_wait)
    assert len(pool.candidates(list(range(100)), 0)) == 4
