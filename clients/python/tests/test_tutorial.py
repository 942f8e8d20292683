"""docs/tutorial.md: every block is run in order, and what it prints is compared with the page."""

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys

import pytest
from conftest import BUILD, ROOT

TEXT = (ROOT / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```([a-z ]+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
URL = "ipc:///tmp/attnd-tutorial.sock"


class Shell:
    """One bash for all sh blocks."""

    def __init__(self, directory):
        env = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
        self.bash = subprocess.Popen(
            ["bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env
        )
        self.log = directory / "log"

    def run(self, block):
        self.bash.stdin.write(f'{{\n{block}}} </dev/null 2>>{self.log}\necho "rc=$?"\n')
        self.bash.stdin.flush()
        for line in self.bash.stdout:
            if line.startswith("rc="):
                assert line == "rc=0\n", self.log.read_text()
                return
        raise AssertionError(f"the shell ended:\n{self.log.read_text()}")

    def close(self):
        self.bash.stdin.close()
        self.bash.stdout.close()
        self.bash.wait(10)


def test_there_is_no_block_of_an_unknown_kind():
    assert {kind for kind, _ in BLOCKS} <= {"sh", "python", "python torch", "text"}
    assert TEXT.count("```") == 2 * len(BLOCKS)


def test_every_block_runs_and_prints_what_the_page_says(tmp_path, monkeypatch):
    has_torch = all(importlib.util.find_spec(m) for m in ("torch", "transformers"))
    socket = str(tmp_path / "s")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    namespace, printed, skipped = {}, "", False
    shell = Shell(tmp_path)
    try:
        for kind, block in BLOCKS:
            block = block.replace(URL, f"ipc://{socket}").replace("build/bin/", f"{BUILD}/bin/")
            if kind == "text":
                if not skipped:
                    assert printed == block
            elif kind == "sh":
                shell.run(block)
            elif kind == "python" or has_torch:
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    exec(compile(block, "docs/tutorial.md", "exec"), namespace)
                printed = out.getvalue()
            skipped = kind == "python torch" and not has_torch
    finally:
        shell.bash.stdin.write("kill %1 2>/dev/null\n")
        shell.close()


def test_the_transformers_block_was_run_too():
    pytest.importorskip("torch", reason="torch is not installed: section 9 was not run")
    pytest.importorskip("transformers", reason="transformers is not installed")
