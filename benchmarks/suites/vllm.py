"""Tokens per second of vLLM with onepass and with vLLM's own attention, on one model and the same requests.

    python -m benchmarks vllm --out FILE                 # on a GPU, compared with vLLM's FLASH_ATTN
    python -m benchmarks vllm --small                    # on a CPU, to see that it runs

The model is a Llama with random weights of a fixed seed. A case such as "16x1024" is 16 requests that arrive at once:
their prompts are random tokens, the longest 1024 and the shortest half of that. All are greedy, for --new tokens.

Each backend serves in a process of its own, since vLLM chooses one per process. The processes take turns, --rounds
times, and each serves all cases --repeats times after a run that is not timed. A row has, for each backend, the seconds
of every timed run and tokens per second by their median, prompts included. "ratio" is onepass's rate to the best
other's. The header's "ready_s" has the seconds after which each process had its engine.

The run that is not timed compares the tokens of each two backends ("agreement"). `same` is the share of requests whose
tokens agree to the end. The others agree for some tokens; `agreeing` is the median of how many. At the first one that
differs both have seen the same tokens, and one backend's log-probability of its own token exceeds that of the other's
by at most `largest_gap`. A gap as small as the rounding of the logits is a tie. None says that the other token was not
among the five most likely. With three backends or more the pairs without onepass show how far vLLM's own backends
depart from each other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onepass.processes import python_command
from onepass.testing.machine import describe
from onepass.testing.results import Report, Row

from ..harness.suite import Args, Suite

MODEL = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 65536,
    "initializer_range": 0.05,  # tokens that depend on what came before
}
SMALL = MODEL | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}
OURS = "onepass"
CASES, SMALL_CASES = "1x1024,16x1024,128x1024,1x32768,16x32768", "1x40,3x40"
SERVED = "served.json"
LIKELY = 5  # tokens whose log-probabilities are kept


@dataclass(frozen=True)
class ServedCase:
    """Requests that arrive at once.

    Attributes:
        requests: how many.
        prompt: tokens of the longest prompt.
    """

    requests: int
    prompt: int

    @classmethod
    def parse(cls, text: str) -> ServedCase:
        """From "16x1024". Raises: argparse.ArgumentTypeError for another form."""
        try:
            requests, prompt = (int(part) for part in text.split("x"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected REQUESTSxTOKENS such as 16x1024, got {text!r}") from None
        return cls(requests, prompt)

    @property
    def label(self) -> str:
        return f"{self.requests}x{self.prompt}"

    def prompts(self, vocabulary: int) -> list[dict[str, list[int]]]:
        """Prompts of random tokens, as vLLM takes them."""
        import torch

        generator = torch.Generator().manual_seed(self.requests)
        lengths = torch.linspace(self.prompt, self.prompt // 2, self.requests).int().tolist()
        return [{"prompt_token_ids": torch.randint(1, vocabulary, (n,), generator=generator).tolist()} for n in lengths]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backends", default="FLASH_ATTN", help="vLLM's own backends, separated by commas")
    parser.add_argument("--cases", help="such as 1x1024,16x1024")
    parser.add_argument("--new", type=int, help="new tokens of each request (256, with --small 6)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each case in a process")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each backend, in turns")
    parser.add_argument("--dtype", default="auto", help="as vLLM takes it; auto is bfloat16, with --small float32")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as vLLM takes it, for example fp8")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs and torch.compile")
    parser.add_argument("--small", action="store_true", help="a model for a CPU")


def complete(args: Args, parser: argparse.ArgumentParser) -> None:
    """Fill in what depends on --small."""
    texts = args.cases or (SMALL_CASES if args.small else CASES)
    try:
        args.chosen = [ServedCase.parse(text) for text in texts.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(f"--cases: {error}")
    args.new = args.new or (6 if args.small else 256)
    args.model = SMALL if args.small else MODEL


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    complete(args, parser)
    args.names = [OURS, *args.backends.split(",")]
    args.found = {}  # by backend, what `serve` returns
    args.temporary = tempfile.TemporaryDirectory()
    make_model(args, Path(args.temporary.name))
    header = describe("cpu" if args.small else "cuda") | {"suite": "vllm", "model": args.model}
    header |= {"new_tokens": args.new, "dtype": args.dtype, "kv_cache_dtype": args.kv_cache_dtype}
    return header | {"cuda_graphs": not (args.eager or args.small), "ready_s": {}}


def processes(args: Args) -> list[str]:
    """The backend of each process, in turns."""
    return [name for turn in range(args.rounds) for name in args.names[:: -1 if turn % 2 else 1]]


def measure(name: str, args: Args, report: Report) -> None:
    """Serve all cases in a process with this backend, and compare all backends that have served so far."""
    served = serve_in_process(name, Path(args.temporary.name), args.argv)
    if served:
        print(f"{name} is ready after {served['ready_s']} s", flush=True)
        report.header["ready_s"].setdefault(name, []).append(served["ready_s"])
        args.found[name] = merged(args.found.get(name), served)
    report.rows = [compared(case, args.new, args.found) for case in args.chosen]
    report.save()


def finish(args: Args, report: Report) -> None:
    args.temporary.cleanup()
    ready = report.header["ready_s"]
    for row in report.rows:
        row["failed"] = [name for name in args.names if len(ready.get(name, ())) < args.rounds]
        print(" ".join(f"{key}={value}" for key, value in row.items() if key != "seconds"), flush=True)


def make_model(options: Args, folder: Path) -> None:
    """Save the model with random weights, in float32 for a CPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cpu" if options.small else "cuda"):
        model: Any = LlamaForCausalLM(LlamaConfig(**options.model))
    model.to(torch.float32 if options.small else torch.bfloat16).save_pretrained(folder)
    del model
    if not options.small:
        torch.cuda.empty_cache()


def serve_in_process(name: str, folder: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """What `serve` returns in a process of its own with this backend; empty if the process fails."""
    environment = {**os.environ, "ONEPASS_VLLM": str(int(name == OURS))}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; without it vLLM's CPU platform takes most memory
    code = "import sys; from benchmarks.suites.vllm import serve_here; serve_here(*sys.argv[1:])"
    command = python_command(code, str(folder), "CUSTOM" if name == OURS else name, *arguments)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if done.returncode:
        print(f"{name} failed: {done.stdout[-4000:]}", flush=True)
        return {}
    return json.loads((folder / SERVED).read_text())


def serve_here(folder: str, backend: str, *arguments: str) -> None:
    """Run the whole life of such a process."""
    parser = SUITE.parser()
    args = parser.parse_args(arguments)
    complete(args, parser)
    (Path(folder) / SERVED).write_text(json.dumps(serve(args, Path(folder), backend)))


def serve(options: Args, folder: Path, backend: str) -> dict[str, Any]:
    """Serve all cases with a backend, which vLLM's CPU platform does not let one choose.

    Returns: "ready_s", the seconds until the engine is ready; "cases", by label, with the "seconds" of each timed run,
    and of each request the "tokens" and the log-probabilities of the "likely" tokens at each step.
    """
    import torch
    from vllm import LLM, SamplingParams

    longest = max(case.prompt for case in options.chosen)
    engine: dict[str, Any] = {"model": str(folder), "skip_tokenizer_init": True, "seed": 0}
    engine |= {"max_model_len": longest + options.new, "max_num_seqs": max(case.requests for case in options.chosen)}
    engine |= {"enable_prefix_caching": False, "enforce_eager": options.eager}
    engine |= {"dtype": options.dtype, "kv_cache_dtype": options.kv_cache_dtype}
    if torch.cuda.is_available():
        engine["attention_backend"] = backend
    else:
        engine |= {"enforce_eager": True, "block_size": 32}
    start = time.perf_counter()
    model = LLM(**engine)
    found: dict[str, Any] = {"ready_s": round(time.perf_counter() - start, 1), "cases": {}}
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": options.new, "detokenize": False, "ignore_eos": True}
    for case in options.chosen:
        requests: Any = case.prompts(options.model["vocab_size"])
        results = model.generate(requests, SamplingParams(**sampling, logprobs=LIKELY), use_tqdm=False)
        outputs = [result.outputs[0] for result in results]
        seconds = []
        for _ in range(options.repeats):
            start = time.perf_counter()
            model.generate(requests, SamplingParams(**sampling), use_tqdm=False)
            seconds.append(round(time.perf_counter() - start, 4))
        found["cases"][case.label] = {
            "seconds": seconds,
            "tokens": [list(output.token_ids) for output in outputs],
            "likely": [[{t: p.logprob for t, p in step.items()} for step in output.logprobs] for output in outputs],
        }
    return found


def merged(earlier: dict[str, Any] | None, served: dict[str, Any]) -> dict[str, Any]:
    """What two processes of a backend found: the seconds of both, the tokens of the first."""
    if earlier is None:
        return served
    for label, case in earlier["cases"].items():
        case["seconds"] += served["cases"][label]["seconds"]
    return earlier


def compared(case: ServedCase, new_tokens: int, found: dict[str, dict[str, Any]]) -> Row:
    """The row of a case. Args: found: by backend, what `serve` returns."""
    served = {name: backend["cases"][case.label] for name, backend in found.items()}
    tokens = case.requests * new_tokens
    rates = {name: round(tokens / statistics.median(of["seconds"]), 1) for name, of in served.items()}
    row: Row = {"case": case.label, "requests": case.requests, "prompt": case.prompt, "tokens_per_s": rates}
    row["seconds"] = {name: of["seconds"] for name, of in served.items()}
    others = {name: rate for name, rate in rates.items() if name != OURS}
    if OURS in rates and others:
        best = max(others, key=others.__getitem__)
        row["ratio"] = round(rates[OURS] / others[best], 3)
    pairs = itertools.combinations(served, 2)
    row["agreement"] = {f"{a}, {b}": agreement(served[a], served[b]["tokens"]) for a, b in pairs}
    return row


def agreement(one: dict[str, Any], others: list[list[int]]) -> Row:
    """How tokens of two backends agree. Args: one: of a case, from `serve`. others: the other backend's tokens."""
    gaps: list[float | None] = []
    agreeing = []
    for mine, theirs, likely in zip(one["tokens"], others, one["likely"], strict=True):
        if mine != theirs:
            step = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
            of_mine, of_theirs = (likely[step].get(str(pair[step])) for pair in (mine, theirs))
            gaps.append(None if of_theirs is None else round(of_mine - of_theirs, 4))
            agreeing.append(step)
    known = [gap for gap in gaps if gap is not None]
    return {
        "same": round(1 - len(gaps) / len(others), 3),
        "agreeing": statistics.median(agreeing) if agreeing else None,
        "largest_gap": None if len(known) < len(gaps) else max(known, default=0.0),
    }


SUITE = Suite(
    "vllm", __doc__, add_options, start, processes, measure, finish=finish, is_wrong=lambda row: row["failed"]
)
