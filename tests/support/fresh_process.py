"""Programs in processes that have imported torch and nothing of onepass.

Importing torch takes more than a second. One process imports it, and forks a process for each program.
"""

from __future__ import annotations

import atexit
import functools
import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

SERVER = """
import json, os, runpy, sys, traceback
import torch

def run(path, module, arguments, output):
    os.dup2(os.open(output, os.O_WRONLY), 1)
    os.dup2(1, 2)
    sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True) if module else runpy.run_path(path)
        return 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        return 1

for line in sys.stdin:
    process = os.fork()
    if not process:
        status = run(**json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, "-c", SERVER], **pipes)
    atexit.register(server.communicate)  # ends it
    return server


def run(code: str = "", module: str = "", arguments: tuple[str, ...] = ()) -> tuple[int, str]:
    """The exit status of a program and what it printed. The program is code, or a module as `python -m` runs it."""
    server = _server()
    with tempfile.TemporaryDirectory() as directory:
        path, output = Path(directory, "program.py"), Path(directory, "output")
        path.write_text(textwrap.dedent(code))
        output.touch()
        request = {"path": str(path), "module": module, "arguments": arguments, "output": str(output)}
        print(json.dumps(request), file=server.stdin, flush=True)
        status = server.stdout.readline()
        return int(status or server.wait()), output.read_text()


def check(code: str) -> None:
    """Run code that must not raise."""
    status, output = run(code)
    assert status == 0, output
