"""Measurements with their circumstances: what is timed, how, beside whom, and on which machine.

cases.py     what is measured: named sets of cases         flops.py    how much work a case is
peers.py     who is measured: onepass and its peers        check.py    is the result right? asked before any timing
timing.py    interleaved timing on CPU and CUDA            memory.py   peak extra memory, in a fresh process
machine.py   the header: device, clocks, versions, commit  run.py      all of it together, into one JSON file
plot.py      the JSON file as bar charts
"""
