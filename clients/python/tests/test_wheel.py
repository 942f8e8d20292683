"""The wheel: built from what cmake made, installed where nothing else of attnd is."""

import importlib.util
import os
import re
import subprocess
import sys

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


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The python of a venv with nothing but the wheel and what is installed here (numpy)."""
    missing = [m for m in ("pip", "setuptools", "wheel") if importlib.util.find_spec(m) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "tree" / "clients" / "python"  # as in the tree, where pip may write
    source.mkdir(parents=True)
    for name in ("src", "pyproject.toml", "setup.py", "README.md"):
        run("cp", "-r", PACKAGE / name, source)
    (directory / "tree" / "scripts").symlink_to(ROOT / "scripts")
    offline = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    pip = [sys.executable, "-m", "pip"]
    options = ["--no-build-isolation", "--no-deps", "-w", directory]
    run(*pip, "wheel", *options, source, ATTN_BUILD=str(BUILD), **offline)
    (wheel,) = directory.glob("attnd-*.whl")
    assert re.search(r"-py3-none-manylinux_\d+_\d+_\w+\.whl$", wheel.name)
    venv = directory / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", venv)
    python = venv / "bin" / "python"
    run(*pip, "--python", python, "install", wheel, **offline)  # numpy must be there
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
