"""Suites of measurements on a GPU, each run as `python -m onepass.bench.suites.<name>`; --help says what it takes.

forward_sm90.py   the Hopper forward         decode.py         attention_decode, one length for all sequences
backward_sm90.py  the Hopper backward        decode_packed.py  attention_decode of packed queries
sm80.py           the Ampere kernels         decode_e4m3.py    attention_decode over e4m3 caches
float32.py        the Hopper forward in      quantize.py       quantize_fp8
                  float32                    call_cost.py      CPU time of a call
fp8.py            the Hopper forward in FP8    modifiers.py    what ranges, ALiBi, a bias, dropout cost

grid.py           the FlashAttention-3 paper's grid: its cases, options, tables
ahead.py          compiling a suite's kernels in parallel before they are timed
"""
