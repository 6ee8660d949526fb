"""A machine for `onepass.tune` without a GPU: it compiles nothing, and the test says how long a configuration takes."""

import random

import torch

from onepass.kernels.compiler import compile
from onepass.kernels.config import HOPPER
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.kernels.heuristics import tuned
from onepass.problem import AttentionProblem, Mask
from onepass.tuning import race, tuner
from onepass.tuning.result import Task

GPU = "Imagined GPU"
PROBLEM = AttentionProblem(torch.bfloat16, "cuda", 4, 4096, 4096, 16, 16, 128, 128, 0.1, Mask(None, 0))
TASK = Task("fwd", "sm90", PROBLEM)
USUAL = heuristics.forward_config_sm90(PROBLEM)


class FakeRuns:
    """Configurations whose calls take `ms(config)`, give or take `noise`; results of `wrong` ones are off."""

    def __init__(self, ms, noise=0.0, wrong=lambda config: False, interrupt_after=None):
        self.ms, self.noise, self.wrong = ms, noise, wrong
        self.random, self.left = random.Random(0), interrupt_after

    def results(self, config):
        torch.manual_seed(0)
        return {"out": torch.randn(2, 8) + 0.5 * self.wrong(config), "lse": torch.zeros(2)}

    def sampler(self, config):
        def sample():
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise KeyboardInterrupt
            # long enough for a warm-up of one call
            return 100 * self.ms(config) * (1 + self.random.gauss(0, self.noise))

        return sample


def machine(runs, failed=()):
    """A machine that compiles nothing, and on which the kernels of the configurations in `failed` do not compile."""

    def compile_each(requests, workers, on_done):
        on_done(len(requests), len(requests))
        return {request[:3]: "out of registers" for request in requests if request[1] in failed}

    return tuner.Machine(GPU, lambda task: runs, lambda task, config: [("forward", config, HOPPER, None)], compile_each)


def samples_of_a_race(num_candidates, rounds):
    """The numbers of samples in the heats, and in a final of the heuristics' choice twice and three others."""
    return num_candidates * (1 + race.HEAT_ROUNDS), 5 * (1 + rounds)


def own_cache(monkeypatch, tmp_path):
    """Give a test, as the body of a fixture, its own cache directory and tables, and a known version of the kernels."""
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ONEPASS_TUNED", raising=False)
    monkeypatch.setattr(compile, "environment", lambda: "these kernels")
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped.json")
    (tmp_path / "shipped.json").write_text(tuned.dump({}))
    tuned.forget()
    yield
    tuned.forget()
