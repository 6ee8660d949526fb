"""vLLM with onepass gives the tokens of vLLM without it, on a CPU: prompts in chunks, cached prefixes, decoding.

`make test-vllm` builds an environment with vLLM and runs these tests there. Elsewhere they are skipped.
"""

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import serve

from benchmarks.suites import vllm as vllm_bench

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
# In 16 bits two tokens whose logarithms are this close may change places: a logit of 8 is rounded by up to 0.03.
TIE = 0.15
E4M3 = "llama, e4m3 cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def served(folder):
    """What vLLM alone and vLLM with onepass give, by the name of the model. Each side is one process."""
    for name in serve.MODELS:
        serve.make_model(name, folder)
    sides = []
    for with_onepass, names in (("0", [name for name in serve.MODELS if name != E4M3]), ("1", serve.MODELS)):
        # Both sides run at once, with one thread each: threads on busy cores wait for one another.
        environment = {**os.environ, "ONEPASS_VLLM": with_onepass, "ONEPASS_LOG": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, serve.__file__, str(folder), *names]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        sides.append(subprocess.Popen(command, env=environment, **pipes))
    try:
        with ThreadPoolExecutor(len(sides)) as pool:
            outputs = list(pool.map(lambda side: side.communicate(timeout=600), sides))
    finally:
        for side in sides:
            side.kill()
    for side, (_, errors) in zip(sides, outputs, strict=True):
        assert side.returncode == 0, errors[-3000:]
    assert ["onepass: attention over a cache" in errors for _, errors in outputs] == [False, True]
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs]


@needs_vllm
@pytest.mark.parametrize("name", [name for name in serve.MODELS if name != E4M3])
def test_tokens_are_those_of_vllm(name, served):
    plain, found = (side[name]["requests"] for side in served)
    assert [set(side[name]["attention"]) for side in served] == [{"CPUAttentionBackendImpl"}, {"OnepassImpl"}]
    assert (
        [len(request) for request in found]
        == [len(request) for request in plain]
        == [serve.NEW_TOKENS] * len(serve.PROMPTS)
    )
    tie = TIE if "bfloat16" in name else 0.0
    for mine, theirs in zip(found, plain, strict=True):
        for step, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            token, expected = next(iter(one)), next(iter(other))
            if token != expected:
                # from here on the two requests have different tokens before them
                assert tie, f"token {step}: expected {expected}, got {token}"
                assert token in other, f"token {step}: expected one of {other}, got {token}"
                assert other[expected] - other[token] < tie
                break
    if not tie:
        tokens = [[next(iter(step)) for step in request] for request in found]
        assert tokens[1] == tokens[-1]  # the same prompt, computed and from the cache
        assert len({token for request in tokens for token in request}) > 4


@needs_vllm
def test_tokens_from_an_e4m3_cache(folder, served):
    """Those of transformers with the same rounding. vLLM's own kernel for CPUs departs from them within nine tokens."""
    found = served[1][E4M3]
    assert set(found["attention"]) == {"OnepassImpl"}
    path, _ = serve.make_model(E4M3, folder)
    tokens = [[int(next(iter(step))) for step in request] for request in found["requests"]]
    assert [len(request) for request in tokens] == [serve.NEW_TOKENS] * len(serve.PROMPTS)
    assert tokens == serve.by_transformers_with_e4m3_keys(path, tokens)


@needs_vllm
@pytest.mark.slow
def test_bench(tmp_path):
    """The program that measures tokens a second, on a small model: on a CPU both run, and their tokens agree."""
    path = tmp_path / "vllm.json"
    assert vllm_bench.SUITE.main(["--small", "--repeats=2", "--rounds=2", f"--out={path}"]) == 0
    content = json.loads(path.read_text())
    assert (content["status"], content["header"]["new_tokens"]) == ("complete", 6)
    assert [row["requests"] for row in content["rows"]] == [1, 3]
    for row in content["rows"]:
        assert row["agreement"] == {"onepass, FLASH_ATTN": {"same": 1.0, "agreeing": None, "largest_gap": 0.0}}
        assert all(len(seconds) == 4 and min(seconds) > 0 for seconds in row["seconds"].values())
        assert row["ratio"] > 0


def test_bench_measures_how_far_differing_tokens_are_apart():
    likely = [{"3": -0.5, "4": -0.6}, {"7": -0.1, "8": -2.0}]
    ours = {"tokens": [[3, 7], [3, 7], [3, 7]], "likely": [likely] * 3}
    same, tie, far = [3, 7], [4, 9], [3, 8]
    found = [vllm_bench.agreement(ours, others) for others in ([same] * 3, [same, tie, same], [same, tie, far])]
    assert found[0] == {"same": 1.0, "agreeing": None, "largest_gap": 0.0}
    assert found[1] == {"same": 0.667, "agreeing": 0, "largest_gap": 0.1}
    assert found[2] == {"same": 0.333, "agreeing": 0.5, "largest_gap": 1.9}
    assert vllm_bench.agreement(ours, [[3, 9], tie, far])["largest_gap"] is None
