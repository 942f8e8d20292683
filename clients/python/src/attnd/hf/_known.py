"""Which code is known: that of torch, transformers and peft as it was installed.

Whether a class or a function of theirs is still the one of its source shows in where its code is from.
What others define, or have put in their place, may compute anything.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import pathlib
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from typing import Any

from ._handed import refuse

PACKAGES = ("torch", "transformers", "peft")
_FOLDERS = (*PACKAGES, "huggingface_hub")
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_IS_MADE_BY_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_DEFINED = re.compile(r"^(?:def|class) (\w+)", re.MULTILINE)


def refuse_sharing(what: str) -> Exception:
    return refuse(f"share_prefixes, and {what}")


def unwrapped(x: Any) -> Any:
    while isinstance(x, functools.partial):
        x = x.func
    return x


def named(x: Any) -> str:
    """A function, a class or another object, by where it was defined."""
    x = unwrapped(x)
    of = x if hasattr(x, "__qualname__") else type(x)
    return f"{of.__module__}.{of.__qualname__}"


@functools.cache
def _folder(package: str) -> str:
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None)
    return os.path.dirname(file) + os.sep if file else "\0"


def versions() -> list[str]:
    loaded = [name for name in PACKAGES if name in sys.modules]
    return [f"{name} {importlib.metadata.version(name)}" for name in loaded]


def is_known_module(name: str | None) -> bool:
    package = (name or "").partition(".")[0]
    return package in _FOLDERS or package in sys.stdlib_module_names


def _is_known_file(file: str) -> bool:
    if any(file.startswith(_folder(name)) for name in _FOLDERS if name in sys.modules):
        return True
    return file.startswith(_STDLIB) and "-packages" + os.sep not in file


def is_known_function(function: types.FunctionType) -> bool:
    return _is_known_file(function.__code__.co_filename)


def is_native(cls: type) -> bool:
    """Whether an object of it may hold what Python does not see."""
    python = (object, Exception, BaseException, dict, list, tuple, set)
    return any(
        base.__module__.startswith("torch._C")
        or hasattr(base, "__slots__")
        or (base not in python and not base.__flags__ & _IS_MADE_BY_PYTHON)
        for base in cls.__mro__
    )


def _functions_of(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    for name, value in vars(cls).items():
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        for function in (value.fget, value.fset) if isinstance(value, property) else (value,):
            if isinstance(function, types.FunctionType):
                yield name, function


def check_class(cls: type) -> None:
    """Refuses a class that is not of a known package, or of which something was replaced."""
    if not is_known_module(cls.__module__) or "<locals>" in cls.__qualname__:
        raise refuse_sharing(
            f"the class {named(cls)}: what it computes is not known, as it is"
            f" none of {', '.join(PACKAGES)}"
        )
    for name, function in _functions_of(cls):
        is_generated = name.startswith("__") and function.__code__.co_filename == "<string>"
        is_own = name != "forward" or function.__module__ == cls.__module__
        if not (is_generated or (is_own and is_known_function(function))):  # dataclasses' are
            raise refuse_sharing(
                f"{cls.__qualname__}.{name}, which was replaced by a function of"
                f" {function.__code__.co_filename}"
            )


@functools.cache
def _defined_in(file: str) -> frozenset[str]:
    return frozenset(_DEFINED.findall(pathlib.Path(file).read_text(encoding="utf-8")))


def check_module(module: types.ModuleType) -> None:
    """Refuses one of whose own functions or classes any was replaced."""
    file = module.__file__
    if file is None or not file.endswith(".py"):
        return
    for name in _defined_in(file) & vars(module).keys():
        value = vars(module)[name]
        is_function = isinstance(value, types.FunctionType)
        is_own = _module_of(value) == module.__name__ and getattr(value, "__name__", name) == name
        if is_function:  # decorators' are of another file, or have another's name
            is_own = value.__code__.co_filename == file or (is_own and is_known_function(value))
        if not is_own:
            raise refuse_sharing(f"{module.__name__}.{name}, which was replaced by {named(value)}")


def _module_of(value: Any) -> str | None:
    return getattr(value, "__module__", None) or type(value).__module__


def classes_of(objects: Iterable[Any]) -> list[type]:
    """Their classes and what those inherit from, each once, in an order of their names."""
    found = {base for x in objects for base in type(x).__mro__ if base is not object}
    return sorted(found, key=lambda cls: (cls.__module__, cls.__qualname__))
