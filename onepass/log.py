"""Log messages about backends and kernels, with ONEPASS_LOG=1 or at the level INFO of the logger "onepass".

Each message comes once a process: which backend computes a problem, and which kernels were compiled or loaded.
"""

from __future__ import annotations

import functools
import logging

from . import variables

logger = logging.getLogger("onepass")

if variables.LOG.read():
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def is_on() -> bool:
    return logger.isEnabledFor(logging.INFO)


@functools.lru_cache(maxsize=4096)
def say_once(message: str) -> None:
    logger.info(message)
