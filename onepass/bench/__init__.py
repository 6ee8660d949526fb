"""Measurements: what is timed, how, compared with which peers, and on which machine.

cases.py     what is measured: named sets of cases         flops.py    how much work a case is
peers.py     onepass and its peers behind one call form    check.py    is the result right? asked before timing
memory.py    peak extra memory, in a fresh process         rows.py     how to run, the rows of a results file
run.py       case sets, measured into one JSON file        decode.py   steps of decoding
ablation.py  what each choice of a kernel is worth         plot.py     the JSON file as bar charts
clone.py     programs of benchmarks/, in a clone            chart.py, suites/, timeline/   old names of such programs
"""
