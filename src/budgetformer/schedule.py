"""Exploration, then exploitation: what training progress says of noise, temperature and budget."""

from dataclasses import dataclass

from budgetformer.config import BudgetConfig


@dataclass(frozen=True, kw_only=True)
class Exploration:
    """How freely routing explores at one moment of training.

    tau: temperature of the soft gates. noise: scale of the Gumbel noise on the relevance scores. target: the budget
    aimed at now, a share. sample: round the wanted number of units at random (its mean is exact), not to the nearest.
    """

    tau: float
    noise: float
    target: float
    sample: bool


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Exploration as a pure function of progress in [0, 1]; nothing is stored, so a resumed run keeps to its curve."""

    budget: BudgetConfig

    def at(self, progress: float) -> Exploration:
        """The exploration at `progress`: 0 is the first step of training, 1 the last."""
        b, progress = self.budget, min(max(progress, 0.0), 1.0)
        if b.relevance == "fixed":  # nothing is to be found out
            return self.settled
        remaining = max(0.0, 1.0 - progress / b.anneal_until) if b.anneal_until > 0 else 0.0
        noisy = max(0.0, 1.0 - progress / b.explore_until) if b.explore_until > 0 else 0.0
        return Exploration(
            tau=max(b.tau_end, b.tau_start * (1.0 - progress) ** 2),
            noise=b.noise * noisy,
            target=b.first_target + (1.0 - b.first_target) * remaining,
            sample=noisy > 0.0,
        )

    @property
    def settled(self) -> Exploration:
        """Exploitation: what use (evaluation, prediction) sees."""
        return Exploration(tau=self.budget.tau_end, noise=0.0, target=self.budget.first_target, sample=False)
