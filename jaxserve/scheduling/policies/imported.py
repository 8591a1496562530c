"""What a user's own module or file holds under a name.

Owns how such a module is found. Never looks at what it finds.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys
from types import ModuleType
from typing import Any


def find(where: str, name: str) -> Any:
    """The attribute `name` of a module, or of a file.

    Args:
      where: a module's dotted name, or a path that may lack its .py. A dotted name that
        cannot be imported is looked for as a file below the current directory.

    Raises:
      ValueError: there is no such module, it fails, or it lacks the name; a sentence
        without a subject, to follow what the user wrote.
    """
    module = _import(where)
    if not hasattr(module, name):
        names = sorted(n for n in vars(module) if not n.startswith("_"))
        raise ValueError(
            f"must name something that {module.__file__} has; {name!r} is not among "
            f"{names}"
        )
    return getattr(module, name)


def _import(where: str) -> ModuleType:
    dotted = all(part.isidentifier() for part in where.split("."))
    dotted = dotted and not where.endswith(".py")
    file = where.replace(".", "/") if dotted else where.removesuffix(".py")
    path = pathlib.Path(f"{file}.py").resolve()
    trying = f"import {where}"
    try:
        module = _module(where) if dotted else None
        if module is not None:
            return module
        trying = f"running {path}"
        if path.is_file():
            return _run(path)
    except Exception as error:
        raise ValueError(
            f"cannot be imported: {trying} failed with {error!r}; correct that module"
        ) from error
    tried = f"import {where}, then {path}" if dotted else f"{path}"
    raise ValueError(
        f"cannot be imported: tried {tried}, and there is none; write "
        "path/to/file.py:name, or the name of a known policy"
    )


def _module(name: str) -> ModuleType | None:
    """The module, or None if there is none; what it lacks itself is an error."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def _run(path: pathlib.Path) -> ModuleType:
    """The module of a file, known by its path, since dataclasses look it up."""
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec and spec.loader, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module
