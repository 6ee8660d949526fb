"""The functions that choose configurations, by direction and backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from ...problem import AttentionProblem
from ..config import BackwardConfig, BackwardConfigSm80, ForwardConfig, ForwardConfigSm80, LaunchConfig
from .sm80 import backward_config_sm80, forward_config_sm80
from .sm90 import backward_config, forward_config


class Chooser(NamedTuple):
    """The choice of a backend's configurations in one direction.

    Attributes:
        config_type: their class.
        choose: (problem, architecture) -> configuration.
    """

    config_type: type[LaunchConfig]
    choose: Callable[[AttentionProblem, str], LaunchConfig]


FORWARD = {
    "sm90": Chooser(ForwardConfig, forward_config),
    "sm80": Chooser(ForwardConfigSm80, forward_config_sm80),
}
BACKWARD = {
    "sm90": Chooser(BackwardConfig, backward_config),
    "sm80": Chooser(BackwardConfigSm80, backward_config_sm80),
}


def chooser(direction: Literal["fwd", "bwd"], backend: str) -> Chooser:
    return (FORWARD if direction == "fwd" else BACKWARD)[backend]
