"""Programs that compare onepass with other libraries, and their results files. They are not in the wheel.

__main__.py      python -m benchmarks NAME: one of the suites, or chart
suites/          kernels and their peers on a GPU, serving loops, whole models, process groups
harness/         what suites share: the paper's grid, compiling ahead, what a GPU does during a call
timeline/        what `onepass trace` records, and python -m benchmarks.timeline: programs for its traces
chart.py         the pictures of README and docs/performance.md, from results files
code_metrics.py  lines of code, docstrings, import circles, words
results/         results files
"""
