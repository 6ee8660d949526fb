"""What suites share.

suite.py       `Suite`: cases, checks and measurements as data, and the one program that runs them
grid.py        the FlashAttention-3 paper's grid: its cases, options, tables
contenders.py  kernels with other configurations, and peers: their checks, and their times in the grid
ahead.py       compiling a suite's kernels in parallel before they are timed
activity.py    what a GPU does during a call
"""
