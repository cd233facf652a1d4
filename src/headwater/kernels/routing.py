"""How the rows of a batch choose among experts: plain data, without torch, because it is part of a model's name.

`moe.route` computes with it. Every family's rule is one value of this class; there is no code by family.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.errors import ModelError

SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")


@dataclass(frozen=True, kw_only=True)
class RoutingRule:
    """Score, choose, weigh. Experts may be choosable in groups: the best groups are kept, and the choice is among their
    experts. A bias that a checkpoint may hold counts for the choice and not for the weights."""

    top_k: int
    """Experts for a row."""
    scores: str = "softmax"
    """Over all experts, or a sigmoid for each."""
    num_groups: int = 1
    groups_kept: int = 1
    group_score: str = "max"
    """A group's score: its best expert's, or the sum of its two best (`top2`), both with the bias."""
    renormalise: bool = False
    """Make the weights of a row sum to 1, before they are scaled."""
    scaling: float = 1.0

    def check(self, num_experts: int) -> None:
        """Raise ModelError where this rule cannot choose among so many experts."""
        if self.scores not in SCORES or self.group_score not in GROUP_SCORES:
            raise ModelError(f"routing by {self.scores} and {self.group_score} of groups is not supported")
        if num_experts % self.num_groups or not 1 <= self.groups_kept <= self.num_groups:
            raise ModelError(
                f"{num_experts} experts cannot be divided into {self.num_groups} groups of which {self.groups_kept} "
                "are kept"
            )
        size = num_experts // self.num_groups
        if not 1 <= self.top_k <= size * self.groups_kept:
            raise ModelError(
                f"a row cannot have {self.top_k} experts out of the {size * self.groups_kept} among which it chooses"
            )
        if self.num_groups > 1 and self.group_score == "top2" and size < 2:
            raise ModelError(f"{self.num_groups} groups of {num_experts} experts have no two experts each")
