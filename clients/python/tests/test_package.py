"""What holds without a daemon: importing, finding the library, exceptions."""

import importlib.util
import pickle
import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import BUILD, PACKAGE

import attnd
from attnd import _lib, errors


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(PACKAGE / "src"), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_import_loads_neither_numpy_nor_torch_nor_the_library():
    r = run_python(
        "import sys, attnd, attnd._lib\n"
        "heavy = {'numpy', 'torch', 'transformers', 'asyncio', 'dataclasses', 'json', 'inspect'}\n"
        "print(sorted(heavy & set(sys.modules)), attnd._lib._lib)",
        ATTN_LIBRARY="/nonexistent",
    )
    assert r.stdout.strip() == "[] None", r.stderr


def test_a_missing_library_is_named_with_what_to_do():
    r = run_python("import attnd; attnd.connect('ipc:///x')", ATTN_LIBRARY="/nowhere/libattn.so")
    assert "LibraryNotFound" in r.stderr
    assert "/nowhere/libattn.so" in r.stderr
    assert "ATTN_LIBRARY" in r.stderr


def test_a_file_that_is_no_library_is_refused(tmp_path):
    fake = tmp_path / "libattn.so.0"
    fake.write_text("not a library")
    r = run_python("import attnd; attnd.connect('ipc:///x')", ATTN_LIBRARY=str(fake))
    assert "LibraryNotFound" in r.stderr and str(fake) in r.stderr


@pytest.mark.parametrize("place", ["attnd/native/lib", "../.."], ids=["in it", "as installed"])
def test_the_library_is_found_where_the_package_is(tmp_path, place):
    package = tmp_path / "lib" / "attnd" / "python" / "attnd"
    package.mkdir(parents=True)
    for file in (PACKAGE / "src" / "attnd").glob("*.py"):
        (package / file.name).write_bytes(file.read_bytes())
    library = (package.parent / place).resolve() / "libattn.so.0"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.symlink_to(BUILD / "lib" / "libattn.so.0")
    r = subprocess.run(
        [sys.executable, "-c", "import attnd._lib as l; print(l.library()._name)"],
        env={"PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
    )
    assert r.stdout.strip() == str(library), r.stderr


def test_every_status_of_the_library_has_a_class_of_its_own():
    lib = _lib.library()
    unknown = lib.attn_status_message(-100)
    status = -1
    while lib.attn_status_message(status) != unknown:
        assert type(errors.error_of(status, "why")).status == status, lib.attn_status_name(status)
        status -= 1
    assert status < -15
    assert len(errors._CLASSES) == -status - 1


def test_an_exception_carries_name_message_and_advice():
    e = errors.error_of(-6, "the queue is full", 1500)
    assert isinstance(e, attnd.OverloadedError)
    assert (e.status, e.name, e.message) == (-6, "ATTN_EOVERLOAD", "the queue is full")
    assert e.retry_after == 0.0015 and e.is_retryable
    assert str(e) == "the queue is full (ATTN_EOVERLOAD)"
    assert not errors.error_of(-1, "bad").is_retryable
    assert isinstance(errors.error_of(-16, "late"), TimeoutError)


def test_a_status_from_a_newer_library_is_an_internal_error_with_its_number():
    e = errors.error_of(-77, "something new")
    assert isinstance(e, attnd.InternalError) and e.status == -77


def test_exceptions_travel_between_processes():
    e = pickle.loads(pickle.dumps(errors.error_of(-6, "full", 1500)))
    assert type(e) is attnd.OverloadedError
    assert (e.message, e.retry_after, e.status) == ("full", 0.0015, -6)


def test_the_versions_agree():
    assert _lib.library().attn_version().decode() == attnd.__version__
    assert f'version = "{attnd.__version__}"' in (PACKAGE / "pyproject.toml").read_text()


def test_a_wheel_of_python_alone_needs_no_build_and_no_compiler(tmp_path):
    missing = [m for m in ("pip", "setuptools", "wheel") if importlib.util.find_spec(m) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    source = tmp_path / "source"
    shutil.copytree(
        PACKAGE, source, ignore=shutil.ignore_patterns("examples", "tests", "build", "*info")
    )
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "."]
    r = subprocess.run(
        [*command, "-w", str(tmp_path)],
        cwd=source,
        env={"PATH": "/nonexistent", "HOME": str(tmp_path), "PIP_NO_INDEX": "1", "ATTN_BUILD": "/"},
        capture_output=True,
        text=True,
    )
    assert r.returncode == 0, r.stdout + r.stderr
    (wheel,) = tmp_path.glob("attnd-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        (metadata,) = (z.read(n).decode() for n in names if n.endswith(".dist-info/METADATA"))
        (text,) = (z.read(n) for n in names if n.endswith("LICENSE"))
    assert {"attnd/__init__.py", "attnd/hf/__init__.py", "attnd/py.typed"} <= set(names)
    assert "\nLicense: Apache-2.0\n" in metadata
    assert text == (PACKAGE.parents[1] / "LICENSE").read_bytes()
