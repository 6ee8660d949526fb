"""What suites share.

suite.py       `Suite`: cases, checks and measurements as data, and the one program that runs them
grid.py        the FlashAttention-3 paper's grid: its cases, options, tables
kernels.py     `KernelSuite`: one kernel in the grid, with other configurations and its peers
steps.py       suites of decoding: the form of a contender, checks, times
contenders.py  configurations from --variants, and a rough comparison of results
timing.py      timing besides CUDA graphs
ahead.py       compiling a suite's kernels in parallel before they are timed
"""
