"""`python -m onepass.compat run script.py [arguments]`: run a program that imports flash-attn's modules, unchanged."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys

from . import install

USAGE = "usage: python -m onepass.compat run [--replace] (script.py | -m module) [arguments]"


def main(arguments: list[str]) -> None:
    """Do what `python script.py` or `python -m module` does. Args: arguments: what follows this module's name."""
    command, arguments = arguments[:1], arguments[1:]
    replace = arguments[:1] == ["--replace"]
    script = arguments[1:] if replace else arguments
    is_module = script[:1] == ["-m"]
    script = script[1:] if is_module else script
    if {*command, *script[:1]} & {"-h", "--help"}:
        print(f"{__doc__}\n\n{USAGE}")
        return
    if command != ["run"] or not script or script[0].startswith("-"):
        sys.exit(USAGE)
    if not is_module and not os.path.exists(script[0]):
        sys.exit(f"onepass.compat: expected a script, got {script[0]!r}, which does not exist")
    if os.path.isdir(script[0]) and not is_module and not os.path.exists(os.path.join(script[0], "__main__.py")):
        sys.exit(f"onepass.compat: expected a script, got {script[0]!r}, a directory without __main__.py")
    install(replace=replace)
    sys.argv = script
    if is_module:
        if (reason := _refusal(script[0])) is not None:
            sys.exit(f"onepass.compat: expected a module that can be run, got {script[0]!r}, {reason}")
        runpy.run_module(script[0], run_name="__main__", alter_sys=True)
        return
    # the script's directory takes the place of the current one, which `python -m` put there
    sys.path[0] = os.path.dirname(os.path.abspath(script[0]))
    runpy.run_path(script[0], run_name="__main__")


def _refusal(module: str) -> str | None:
    """Why a module cannot be run by its name; None if it can. The packages that it is in are imported."""
    if module.startswith("."):
        return "a relative name"
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            main_module = importlib.util.find_spec(f"{module}.__main__")
            return None if main_module is not None else "a package without __main__"
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # a package that it is in needs another one
            raise
        spec = None
    except ValueError:  # a module without a specification
        spec = None
    return "which does not exist" if spec is None else None


if __name__ == "__main__":
    main(sys.argv[1:])
