"""`python -m onepass.compat run script.py [arguments]`: run a program that imports flash-attn's modules, unchanged."""

from __future__ import annotations

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
    if command != ["run"] or not script or script[0].startswith("-"):
        sys.exit(USAGE)
    if not is_module and not os.path.exists(script[0]):
        sys.exit(f"onepass.compat: expected a script, got {script[0]!r}, which does not exist")
    install(replace=replace)
    sys.argv = script
    if is_module:
        runpy.run_module(script[0], run_name="__main__", alter_sys=True)
        return
    # the script's directory takes the place of the current one, which `python -m` put there
    sys.path[0] = os.path.dirname(os.path.abspath(script[0]))
    runpy.run_path(script[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
