"""attnd.Daemon: starts, stops, and goes with the process that it belongs to."""

import os
import select
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import BUILD, PACKAGE

import attnd

PROGRAM = BUILD / "bin" / "attnd"


def test_it_runs_while_the_block_does():
    with attnd.Daemon({"device.kv_memory": "32M"}, program=PROGRAM) as daemon:
        assert os.stat(daemon.log.parent).st_mode & 0o777 == 0o700
        with daemon.connect() as client:
            pool = client.create_pool(attnd.PoolSpec("all", 1, 1, 1, 32))
            assert 15 << 20 < pool.spec.n_blocks * pool.spec.block_tokens * 2 * 32 * 4 <= 16 << 20
    assert daemon.process.returncode == 0
    assert not daemon.log.parent.exists()
    daemon.close()  # again


def test_it_may_be_started_again():
    with attnd.Daemon(program=PROGRAM) as daemon:
        for _ in range(2):
            daemon.connect().close()
            assert daemon.stop() == 0
            daemon.start()


def test_what_attnd_says_is_in_the_error():
    with pytest.raises(RuntimeError, match="device.kv_memory = lots is not a size"):
        attnd.Daemon({"device.kv_memory": "lots"}, program=PROGRAM)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        attnd.Daemon(program="/nowhere/attnd")


@pytest.mark.parametrize("lib", ["lib", "lib/x86_64-linux-gnu"])
def test_the_program_is_found_where_the_package_is_installed(tmp_path, lib):
    package = tmp_path / lib / "attnd" / "python" / "attnd"
    shutil.copytree(PACKAGE / "src" / "attnd", package)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "attnd").touch()
    r = subprocess.run(
        [sys.executable, "-c", "import attnd; print(attnd.daemon._program())"],
        env={"PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
    )
    assert r.stdout.strip() == str(tmp_path / "bin" / "attnd"), r.stderr


OWNER = """
import os, sys, attnd
daemon = attnd.Daemon(program=sys.argv[1])
if os.fork() == 0:
    sys.exit()  # a child's end is not the daemon's
os.wait()
daemon.connect().close()
print(daemon.process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["exits", "is killed"])
def test_it_ends_with_its_process(python_env, end):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(PROGRAM)],
        env=python_env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(owner.stdout.readline())
    pidfd = os.pidfd_open(pid)
    if end == "is killed":
        owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert select.select([pidfd], [], [], 60)[0]
    os.close(pidfd)
