"""Suites of measurements, each run as `python -m benchmarks NAME`; --help says what it takes.

A module has its table of cases, what it checks before it times, and `SUITE`, by which harness/suite.py runs it.

forward_sm90.py      the Hopper forward              decode.py         attention_decode, one length for all sequences
float32.py           the Hopper forward in float32   decode_packed.py  attention_decode of packed queries
fp8.py               the Hopper forward in FP8       decode_e4m3.py    attention_decode over e4m3 caches
backward_sm90.py     the Hopper backward             quantize.py       quantize_fp8
options.py           the Hopper kernels with GQA,    call_cost.py      CPU time of a call
                     packed sequences, options       engine.py         a serving loop with continuous batching
sm80.py              the Ampere kernels              models.py         whole models: generation, training, diffusion
modifiers.py         what ranges, ALiBi, a bias,     vllm.py           vLLM with onepass and with its own attention
                     dropout cost
masks.py             masks as data, block sparsity, compared with cuDNN front end and FlexAttention
context_parallel.py  attention over the ranks of a process group, compared with one device and the peers

context_parallel_cases.py, context_parallel_contenders.py  the cases and the contenders of context_parallel.py
"""

NAMES = (
    "forward_sm90", "float32", "fp8", "backward_sm90", "options", "sm80", "modifiers", "masks",
    "decode", "decode_packed", "decode_e4m3", "quantize",
    "call_cost", "engine", "models", "vllm", "context_parallel",
)  # fmt: skip
