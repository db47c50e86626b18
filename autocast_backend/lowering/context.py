"""What the passes over a graph know besides it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from ..policies.overrides import Overrides
from ..regions import AMBIENT, Placement
from ..reports.report import Report
from ..state import AutocastState
from .planning import Overridden


@dataclass(frozen=True)
class Context:
    """What a pass needs to know besides the graph.

    Attributes:
        ambient: the autocast state around the compiled call.
        validate: "dtype", "strict" or "off".
        other_dtypes: which calls are proved for other floating-point dtypes than they have, too:
            those that the policy table has casts for, "all", or "none".
        overrides: the option `policies`.
        overridden: the calls that it names; `propagate` finds them.
        watched: whether the first run of custom ops is (`custom_ops.py`). Where it is not, one
            whose kernel may call ops that autocast acts on stays under autocast.
        may_stay_eager: whether a graph may be left as it is, where eager autocast shares the cast
            of a weight that a lowered graph could not share; `report.keepers` names the calls then.
        report: filled in as the passes run.
    """

    ambient: AutocastState
    validate: str = "strict"
    other_dtypes: Literal["none", "cast", "all"] = "none"
    overrides: Overrides = field(default_factory=Overrides)
    overridden: dict[fx.Node, Overridden] = field(default_factory=dict)
    watched: bool = True
    may_stay_eager: bool = False
    report: Report = field(default_factory=Report)

    @property
    def outside(self) -> Placement:
        """Where the graph itself stands."""
        return Placement(self.ambient, AMBIENT if self.ambient.enabled_devices else None)
