"""Tokens per second of vLLM with onepass and with vLLM's own attention, on one model and the same requests.

    python -m onepass.bench.suites.vllm --json FILE

Each backend runs in a process of its own, because vLLM chooses once per process. The model is a Llama with random
weights of a fixed seed. Requests of one batch differ in length. They are greedy, so the backends' tokens are compared:
`same_tokens` is the share of requests whose tokens agree to the end (in 16 bits two tokens may be equally likely).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.05,
    "torch_dtype": "bfloat16",
}
SMALL = MODEL | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "torch_dtype": "float32"}
OURS, CHILD = "onepass", "ONEPASS_BENCH_VLLM"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns: the exit status, 1 if a backend did not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="FLASH_ATTN", help="vLLM's own backends, separated by commas")
    parser.add_argument("--requests", default="1,16,128", help="requests at a time")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the longest prompt; the shortest has half")
    parser.add_argument("--new", type=int, default=256, help="new tokens of each request")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each number of requests; the best counts")
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(arguments)
    if CHILD in os.environ:
        print(json.dumps(serve(options)))
        return 0
    names = [OURS, *options.backends.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SMALL if options.small else MODEL))
        found = {
            name: run_in_process(name, folder, arguments if arguments is not None else sys.argv[1:]) for name in names
        }
    rows = compared(found)
    for row in rows:
        print(" ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"model": SMALL if options.small else MODEL, "rows": rows}, indent=1) + "\n")
    return 0 if all(found.values()) else 1


def run_in_process(name: str, folder: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What `serve` returns in a process of its own with this backend; empty if the process fails."""
    environment = {**os.environ, CHILD: folder, "ONEPASS_VLLM": str(int(name == OURS)), "VLLM_LOGGING_LEVEL": "WARNING"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; without it vLLM's CPU platform takes most memory
    environment["ONEPASS_BENCH_VLLM_BACKEND"] = "CUSTOM" if name == OURS else name
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        print(f"{name} failed: {done.stderr[-2000:]}", flush=True)
        return {}
    return json.loads(done.stdout.strip().splitlines()[-1])


def serve(options: argparse.Namespace) -> dict[str, Any]:
    """By the number of requests, seconds and tokens of the backend that the environment names."""
    import torch
    from vllm import LLM, SamplingParams

    engine: dict[str, Any] = {"model": os.environ[CHILD], "load_format": "dummy", "skip_tokenizer_init": True}
    engine |= {"max_model_len": options.prompt + options.new, "enable_prefix_caching": False, "seed": 0}
    if torch.cuda.is_available():
        engine["attention_backend"] = os.environ["ONEPASS_BENCH_VLLM_BACKEND"]
    else:
        engine |= {"enforce_eager": True, "block_size": 32}
    model = LLM(**engine)
    sampling = SamplingParams(temperature=0, max_tokens=options.new, detokenize=False, ignore_eos=True)
    found: dict[str, Any] = {}
    for number in (int(n) for n in options.requests.split(",")):
        generator = torch.Generator().manual_seed(number)
        lengths = torch.linspace(options.prompt // 2, options.prompt, number).int().tolist()
        high = 500 if options.small else 30000
        prompts = [torch.randint(1, high, (n,), generator=generator).tolist() for n in lengths]
        requests: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        seconds = []
        for _ in range(1 + options.repeats):
            start = time.perf_counter()
            results = model.generate(requests, sampling, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
        tokens = [list(result.outputs[0].token_ids) for result in results]
        found[str(number)] = {"seconds": min(seconds[1:]), "tokens": tokens}
    return found


def compared(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each number of requests: tokens per second of each backend, the ratio of ours to the best other."""
    rows = []
    for number in next((served for served in found.values() if served), {}):
        rates = {
            name: len(served[number]["tokens"]) * len(served[number]["tokens"][0]) / served[number]["seconds"]
            for name, served in found.items()
            if served
        }
        row: dict[str, Any] = {"requests": int(number)} | {f"{n} tokens/s": round(rate, 1) for n, rate in rates.items()}
        others = {name: rate for name, rate in rates.items() if name != OURS}
        if OURS in rates and others:
            best = max(others, key=others.__getitem__)
            pairs = list(zip(found[OURS][number]["tokens"], found[best][number]["tokens"], strict=True))
            row["ratio"] = round(rates[OURS] / others[best], 3)
            row["same_tokens"] = round(sum(mine == theirs for mine, theirs in pairs) / len(pairs), 3)
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
