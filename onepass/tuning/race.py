"""The race of configurations: which one is faster, and by more than chance?

In the heats every configuration runs a few rounds. In the final run the fastest of them, the heuristics' choice, and
that choice a second time under another name. The difference between these two is noise, and nothing wins by less. The
samples of the final alone decide: among many equals, the one that leads the heats was lucky there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .timing import Sampler, Samples, Spread, measure_interleaved

HEAT_ROUNDS = 5
FINAL_ROUNDS = 25
FEWEST_FINAL_ROUNDS = 9  # so many still decide after Ctrl-C
FINALISTS = 3
# A winner has to be this much faster (the median of its rounds), and faster in four rounds of five.
LEAST_GAIN = 0.01
AGAIN = "the heuristics' choice again"


class Verdict(NamedTuple):
    """How a race went.

    Attributes:
        winner: the name of the configuration to use: the heuristics' choice unless another is faster beyond the noise.
        speedup: the winner's speed over the heuristics' choice in the final; 1.0 if that won.
        noise: by what share the same configuration, timed twice, differed from itself in the final.
        heats, final: milliseconds of a call in the finished rounds.
        interrupted: whether Ctrl-C ended the race.
    """

    winner: str
    speedup: Spread
    noise: float
    heats: Samples
    final: Samples
    interrupted: bool

    @property
    def is_decided(self) -> bool:
        return not self.interrupted or self.final.rounds >= FEWEST_FINAL_ROUNDS


def race(
    samplers: Mapping[str, Sampler],
    usual: str,
    rounds: int = FINAL_ROUNDS,
    on_round: Callable[[int, int], object] | None = None,
) -> Verdict:
    """Find the fastest of the contenders.

    Args:
        samplers: a sampler for each name; it runs the work and returns the milliseconds of a call.
        usual: the name of the heuristics' choice.
        rounds: rounds of the final.
        on_round: called with the number of rounds that are done, and the number of all.
    Returns: Verdict. Ctrl-C ends the race, and the verdict says so.
    """
    heats, final = Samples({}), Samples({})

    def after_heat(samples: Samples) -> None:
        nonlocal heats
        heats = samples
        if on_round is not None:
            on_round(samples.rounds, HEAT_ROUNDS + rounds)

    def after_final(samples: Samples) -> None:
        nonlocal final
        final = samples
        if on_round is not None:
            on_round(HEAT_ROUNDS + samples.rounds, HEAT_ROUNDS + rounds)

    is_interrupted = False
    try:
        measure_interleaved(samplers, rounds=HEAT_ROUNDS, seed=0, on_round=after_heat)
        names = finalists(heats, usual)
        if names:
            contenders = {usual: samplers[usual], AGAIN: samplers[usual], **{name: samplers[name] for name in names}}
            measure_interleaved(contenders, rounds=rounds, seed=1, on_round=after_final)
    except KeyboardInterrupt:
        is_interrupted = True
    winner, speedup, noise = decide(final, usual)
    return Verdict(winner, speedup, noise, heats, final, is_interrupted)


def finalists(heats: Samples, usual: str) -> Sequence[str]:
    """The contenders that were faster than the heuristics' choice, the fastest first."""
    ratios = {name: heats.speed_ratio(name, usual).median for name in heats.ms if name != usual}
    return sorted((name for name in ratios if ratios[name] > 1), key=lambda name: -ratios[name])[:FINALISTS]


def decide(final: Samples, usual: str) -> tuple[str, Spread, float]:
    """The winner, its speedup, and the noise."""
    same = Spread(1.0, 1.0, 1.0)
    if not final.rounds:
        return usual, same, 0.0
    # twice the difference: the median ratio of two equals is as often nearer to 1 than their noise as it is farther
    noise = 2 * abs(final.speed_ratio(AGAIN, usual).median - 1)
    ratios = {name: final.speed_ratio(name, usual) for name in final.ms if name not in (usual, AGAIN)}
    fast_enough = {n: r for n, r in ratios.items() if r.median > 1 + max(LEAST_GAIN, noise) and r.p20 > 1}
    winner = max(fast_enough, key=lambda name: fast_enough[name].median, default=usual)
    return winner, fast_enough.get(winner, same), noise
