"""The functions that choose configurations, by direction and backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from ...problem import AttentionProblem
from ..config import BackwardConfigSm80, BackwardConfigSm90, ForwardConfigSm80, ForwardConfigSm90, LaunchConfig
from .sm80 import backward_config_sm80, forward_config_sm80
from .sm90 import backward_config_sm90, forward_config_sm90


class Chooser(NamedTuple):
    """The choice of a backend's configurations in one direction.

    Attributes:
        config_type: their class.
        choose: (problem, architecture) -> configuration.
    """

    config_type: type[LaunchConfig]
    choose: Callable[[AttentionProblem, str], LaunchConfig]


FORWARD = {
    "sm90": Chooser(ForwardConfigSm90, forward_config_sm90),
    "sm80": Chooser(ForwardConfigSm80, forward_config_sm80),
}
BACKWARD = {
    "sm90": Chooser(BackwardConfigSm90, backward_config_sm90),
    "sm80": Chooser(BackwardConfigSm80, backward_config_sm80),
}


def chooser(direction: Literal["fwd", "bwd"], backend: str) -> Chooser:
    return (FORWARD if direction == "fwd" else BACKWARD)[backend]
