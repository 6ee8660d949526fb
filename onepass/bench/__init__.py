"""Measurements: what is timed, how, beside which peers, and on which machine.

cases.py     what is measured: named sets of cases         flops.py    how much work a case is
peers.py     onepass and its peers behind one call form    check.py    is the result right? asked before timing
timing.py    interleaved timing on CPU and CUDA            memory.py   peak extra memory, in a fresh process
machine.py   the header: device, clocks, versions, commit  rows.py     the rows of a results file, and the file
run.py       case sets, measured into one JSON file        decode.py   steps of decoding
ablation.py  what each choice of a kernel is worth         plot.py     the JSON file as bar charts
chart.py     the pictures of README and docs/performance.md
activity.py  what a GPU does during a call                 timeline/   what the roles of a kernel do, in time stamps
suites/      the kernels beside their peers on a GPU, each a command of its own
"""
