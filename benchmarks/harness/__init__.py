"""What suites share.

grid.py      the FlashAttention-3 paper's grid: its cases, options, tables
ahead.py     compiling a suite's kernels in parallel before they are timed
activity.py  what a GPU does during a call
"""
