"""The wheel: built from what cmake made, installed where nothing else of attnd is."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import numpy
import pytest
from conftest import BUILD, PACKAGE, ROOT


def run(*command, **env):
    r = subprocess.run(
        [str(c) for c in command],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(("ATTN", "PYTHON"))},
            **env,
        },
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert r.returncode == 0, r.stdout + r.stderr
    return r.stdout


OFFLINE = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
PIP = [sys.executable, "-m", "pip"]
PYTHONS = [f"python3.{minor}" for minor in range(9, 15)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    missing = [m for m in ("pip", "setuptools", "wheel") if importlib.util.find_spec(m) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "tree" / "clients" / "python"  # as in the tree, where pip may write
    source.mkdir(parents=True)
    for name in ("src", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        run("cp", "-rL", PACKAGE / name, source)
    (directory / "tree" / "scripts").symlink_to(ROOT / "scripts")
    options = ["--no-build-isolation", "--no-deps", "-w", directory]
    run(*PIP, "wheel", *options, source, ATTN_BUILD=str(BUILD), **OFFLINE)
    (wheel,) = directory.glob("attnd-*.whl")
    assert re.search(r"-py3-none-manylinux_\d+_\d+_\w+\.whl$", wheel.name)
    return wheel


@pytest.fixture(scope="module")
def python(wheel):
    """The python of a venv with nothing but the wheel and what is installed here (numpy)."""
    venv = wheel.parent / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text(str(pathlib.Path(numpy.__file__).parents[1]))
    run(*PIP, "--python", python, "install", wheel, **OFFLINE)  # numpy must be there
    return python


def test_the_tutorials_first_program_runs_from_the_wheel_alone(python):
    text = (ROOT / "docs" / "tutorial.md").read_text()
    section = text[text.index("## 2.") : text.index("## 4.")]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    printed = re.findall(r"^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    program = "".join(blocks).replace('"ipc:///tmp/attnd-tutorial.sock"', "daemon.url")
    begin = "import attnd\ndaemon = attnd.Daemon()\n"
    end = "client.close()\ndaemon.close()\n"
    assert run(python, "-c", begin + program + end) == "".join(printed)


# Appends and attends; without numpy, opens and forks alone.
A_STEP = """
import math, sys
import attnd, attnd.aio
with attnd.Daemon() as daemon, daemon.connect() as client:
    pool = client.create_pool(attnd.PoolSpec("one", 1, 1, 1, 8, n_blocks=8))
    with pool.open() as seq:
        try:
            import numpy
        except ImportError:
            assert not seq.fork().is_closed
        else:
            q, k, v = numpy.random.default_rng(1).standard_normal((3, 2, 1, 8)).astype("f4")
            out = pool.step(0, [(seq, 0, 2)], q, k, v).out
            w = numpy.exp(k[:, 0] @ q[1, 0] / math.sqrt(8))
            numpy.testing.assert_allclose(out[1, 0], w @ v[:, 0] / w.sum(), rtol=1e-5)
    print(sys.version.split()[0], "numpy" in sys.modules)
"""


@pytest.mark.parametrize("name", PYTHONS)
def test_it_runs_with_every_python_there_is(wheel, tmp_path, name):
    path = shutil.which(name)
    if path is None or subprocess.run([path, "-c", ""], capture_output=True).returncode != 0:
        pytest.skip(f"no {name}")
    with zipfile.ZipFile(wheel) as z:  # as pip does, which not every python here has
        z.extractall(tmp_path)
    (tmp_path / "attnd" / "native" / "bin" / "attnd").chmod(0o755)
    assert run(path, "-W", "error", "-c", A_STEP, PYTHONPATH=str(tmp_path)).startswith(name[6:])


def test_everything_it_loads_is_its_own(python):
    out = run(
        python,
        "-c",
        "import attnd\n"
        "with attnd.Daemon() as d, d.connect() as c:\n"
        "    print(attnd.__file__, attnd._lib.library()._name)\n"
        "    for pid in 'self', d.process.pid:\n"
        "        print(open(f'/proc/{pid}/maps').read())\n",
    )
    native = os.path.join(os.path.dirname(out.split()[0]), "native")
    assert os.path.isfile(os.path.join(native, "..", "py.typed"))
    for name in ("libattn.so.0", "libprotobuf-c.so.1", "libuv.so.1", "bin/attnd"):
        paths = set(re.findall(rf"\S*{re.escape(name)}\S*", out))
        assert paths and all(p.startswith(native) for p in paths), (name, paths)
