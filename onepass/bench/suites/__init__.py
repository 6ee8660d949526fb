"""Suites of measurements on a GPU, each run as `python -m onepass.bench.suites.<name>`; --help says what it takes.

forward_sm90.py      the Hopper forward              decode.py         attention_decode, one length for all sequences
float32.py           the Hopper forward in float32   decode_packed.py  attention_decode of packed queries
fp8.py               the Hopper forward in FP8       decode_e4m3.py    attention_decode over e4m3 caches
backward_sm90.py     the Hopper backward             quantize.py       quantize_fp8
backward_options.py  the Hopper backward with GQA,   call_cost.py      CPU time of a call
                     packed sequences, options       engine.py         a serving loop with continuous batching
sm80.py              the Ampere kernels              models.py         whole models: generation, training, diffusion
modifiers.py         what ranges, ALiBi, a bias,     vllm.py           vLLM with onepass and with its own attention
                     dropout cost
context_parallel.py  attention over the ranks of a process group, beside one device and the peers

context_parallel_contenders.py  the contenders of context_parallel.py
grid.py                         the FlashAttention-3 paper's grid: its cases, options, tables
ahead.py                        compiling a suite's kernels in parallel before they are timed
"""
