"""Which configuration is faster, and when is that no accident?

Heats: everybody a few rounds. Final: who was fastest there, the heuristics' choice, and that choice a second time under
another name. What these two differ by is noise, and no one wins by less. The final's samples alone decide: of many
equals the one that the heats show in front was lucky there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..bench.timing import Sampler, Samples, Spread, measure_interleaved

HEAT_ROUNDS = 5
FINAL_ROUNDS = 25
FEWEST_FINAL_ROUNDS = 9  # that still decide after Ctrl-C
FINALISTS = 3
# A winner has to be this much faster (the median of its rounds), and faster in four rounds of five.
LEAST_GAIN = 0.01
AGAIN = "the heuristics' choice again"


class Verdict(NamedTuple):
    """How a race went.

    Attributes:
        winner: name of the configuration to use: the heuristics' unless another is faster beyond the noise.
        speedup: of the winner over the heuristics' choice in the final; 1.0 if that won.
        noise: what the same configuration timed twice differed by in the final, as a share.
        heats, final: milliseconds of a call; after Ctrl-C those of finished rounds.
        interrupted: by Ctrl-C.
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
        samplers: by name; each runs the work and returns the milliseconds of a call.
        usual: name of the heuristics' choice.
        rounds: of the final.
        on_round: told how many rounds are done, and how many there are in all.
    Returns: Verdict. Ctrl-C ends the race, and it is said there.
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
    """Those that were faster than the heuristics' choice, the fastest first."""
    ratios = {name: heats.speed_ratio(name, usual).median for name in heats.ms if name != usual}
    return sorted((name for name in ratios if ratios[name] > 1), key=lambda name: -ratios[name])[:FINALISTS]


def decide(final: Samples, usual: str) -> tuple[str, Spread, float]:
    """The winner, its speedup, and the noise."""
    same = Spread(1.0, 1.0, 1.0)
    if not final.rounds:
        return usual, same, 0.0
    # twice, for a median of ratios of the same thing is as often nearer to 1 as it is farther from it
    noise = 2 * abs(final.speed_ratio(AGAIN, usual).median - 1)
    ratios = {name: final.speed_ratio(name, usual) for name in final.ms if name not in (usual, AGAIN)}
    fast_enough = {n: r for n, r in ratios.items() if r.median > 1 + max(LEAST_GAIN, noise) and r.p20 > 1}
    winner = max(fast_enough, key=lambda name: fast_enough[name].median, default=usual)
    return winner, fast_enough.get(winner, same), noise
