"""Puts what cmake has built into the wheel: libattn, attnd, and the libraries they need.

$ATTN_BUILD names the build folder, default build/ of the tree. Without one the wheel is Python alone,
and looks for libattn where the system keeps libraries.
"""

import os
import pathlib
import platform
import shutil
import subprocess

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("ATTN_BUILD", ROOT / "build"))
FILES = ("bin/attnd", "lib/libattn.so.0")
IS_NATIVE = all((BUILD / file).is_file() for file in FILES)


class BuildPy(build_py):
    def run(self):
        super().run()
        native = pathlib.Path(self.build_lib, "attnd", "native")
        shutil.rmtree(native, ignore_errors=True)
        if not IS_NATIVE:
            print(f"{BUILD} has no {' and '.join(FILES)}: the wheel is Python alone")
            return
        for file in FILES:
            (native / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(BUILD / file, native / file)
        bundle = ROOT / "scripts" / "bundle.cmake"  # what they need, with licences
        subprocess.run(
            ["cmake", f"-DCPACK_TEMPORARY_DIRECTORY={native.resolve()}", "-P", bundle], check=True
        )
        # a wheel has no links: one file, of the name needed
        for link in (native / "lib").iterdir():
            if link.is_symlink():
                link.resolve().replace(link)


class Native(Distribution):
    def has_ext_modules(self):
        return IS_NATIVE


class Wheel(bdist_wheel):
    """For any Python 3, as nothing is compiled against it, and for this machine's libc or newer."""

    def get_tag(self):
        if not IS_NATIVE:
            return "py3", "none", "any"
        name, version = platform.libc_ver()
        system = f"manylinux_{version.replace('.', '_')}" if name == "glibc" else "linux"
        return "py3", "none", f"{system}_{platform.machine()}"


setup(
    license="Apache-2.0",
    distclass=Native,
    cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel},
)
