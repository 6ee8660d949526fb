"""While the modules of the command `onepass` load, for seconds, Ctrl-C and bad variables end it without a traceback."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from typing import Any

from . import variables

INTERRUPTED = 130  # exit code that a shell reports for a program that Ctrl-C ended
_MODULE = re.compile(r" -\w*m ?onepass(\.cli)?( |$)")  # -m may follow other letters, and the name follow it at once


def is_command() -> bool:
    """Whether this process is `onepass`, `python -m onepass` or `python -m onepass.cli`.

    While Python looks for the module of `-m`, and so imports its package, `sys.argv[0]` is "-m".
    """
    name = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    if name == "-m":
        return _MODULE.search(" ".join(sys.orig_argv)) is not None
    return name in ("onepass", "onepass.exe")


def _begin() -> None:
    """A process that only uses the package is left as it is."""
    if not is_command() or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_process)
    try:
        for variable in (variables.BACKEND, variables.LOG):  # which are read while modules load
            variable.read()
    except ValueError as error:
        if sys.stderr is not None:
            print(f"onepass: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _end_process(*_: Any) -> None:
    os._exit(INTERRUPTED)


_begin()  # when this module is imported, which this package does before it imports torch


def end() -> None:
    """Called when the modules of the command are loaded: Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end_process:
        signal.signal(signal.SIGINT, signal.default_int_handler)
