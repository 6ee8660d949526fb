"""The named barriers of our kernels (hardware barriers 0 to 15 of a thread block), by what they order."""

from __future__ import annotations

import enum


class NamedBarrier(enum.IntEnum):
    """Numbers of the barriers. A role with a barrier for each warpgroup takes as many consecutive numbers."""

    SYNC_THREADS = 0
    # pingpong: warpgroup w waits for PINGPONG + w before it issues its GEMMs; the one before it arrives there
    PINGPONG = 1  # 1, 2, 3, 4
    # the four warps of consumer warpgroup w among themselves
    WARPGROUP = 5  # 5, 6, 7, 8
    # all consumers of the backward
    CONSUMERS = 9
