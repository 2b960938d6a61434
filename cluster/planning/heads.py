"""Acceptance of the exit heads that a plan may assume.

A measured head has the acceptance that was measured at its exit layer. Any other head has an
assumed one, which rises with the exit layer. Reads no files.
"""

from dataclasses import dataclass

from cluster.planning.shapes import Acceptance, Split
from eesd_dist.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceAt:
    """The acceptance of a head at one exit layer."""

    exit_layer: int
    acceptance: float

    @classmethod
    def parse(cls, text: str) -> "AcceptanceAt":
        """Parses `4=0.8`. Raises ValueError."""
        layer, _, acceptance = text.partition("=")
        try:
            return cls(exit_layer=int(layer), acceptance=float(acceptance))
        except ValueError:
            raise ValueError(
                f"found {text!r:.40}, expected an exit layer and an acceptance, like 4=0.8"
            ) from None


ASSUMED = (
    AcceptanceAt(exit_layer=1, acceptance=0.6),
    AcceptanceAt(exit_layer=4, acceptance=0.7),
    AcceptanceAt(exit_layer=16, acceptance=0.8),
)
"""Acceptances by exit layer: at 1 that of the bundled head at temperature 1 (docs/distillation.md);
its rise with the exit layer was not measured."""
USUAL_COVERAGE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredHead:
    """A head with a measured acceptance."""

    exit_layer: int
    draft_vocab_size: int | None
    """Tokens of a truncated head; None: the full vocabulary."""
    acceptance: Acceptance


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The exit heads that a plan may assume."""

    assumed: tuple[AcceptanceAt, ...] = ASSUMED
    """Acceptances by exit layer: linear between them, constant outside. Heads have the full
    vocabulary."""
    measured: MeasuredHead | None = None
    coverage: float = USUAL_COVERAGE
    """Share of the target's tokens that the truncated vocabulary has."""

    def require_valid(self, *, num_layers: int) -> None:
        """Raises ConfigError for a figure that is no probability, or of no exit layer."""
        if not 0.0 < self.coverage <= 1.0:
            raise ConfigError(f"draft coverage {self.coverage}: expected a share above 0, up to 1")
        for at in self.assumed:
            if not 0.0 <= at.acceptance <= 1.0:
                raise ConfigError(
                    f"acceptance {at.acceptance} is not a probability: expected 0 to 1"
                )
            if self.assumed is not ASSUMED and not 1 <= at.exit_layer < num_layers:
                raise ConfigError(
                    f"--acceptance-at {at.exit_layer}={at.acceptance}: expected an exit layer from "
                    f"1 to {num_layers - 1}"
                )

    def acceptance_of(self, split: Split) -> Acceptance:
        """Returns the acceptance of a head at the exit layer of the split."""
        measured = self.measured
        if measured is not None and measured.exit_layer == split.exit_layer:
            acceptance = measured.acceptance
        else:
            acceptance = Acceptance(rate=self._assumed_at(split.exit_layer))
        knows_vocabulary = measured is not None and measured.draft_vocab_size is not None
        if split.draft_vocab_size is None or knows_vocabulary:
            return acceptance
        # Each drafted token must be in the vocabulary, those before it included.
        survival = (
            share * self.coverage**num_tokens
            for num_tokens, share in enumerate(acceptance.survival, 1)
        )
        return Acceptance(rate=acceptance.rate * self.coverage, survival=tuple(survival))

    def describe(self) -> str:
        """Returns a line on where the acceptance comes from."""
        if self.measured is not None:
            return (
                f"acceptance: measured {self.measured.acceptance.rate:.2f} at exit layer "
                f"{self.measured.exit_layer}; assumed from it at others"
            )
        if len(self.assumed) == 1:
            points = f"{self.assumed[0].acceptance:g} at every exit layer"
        else:
            points = ", ".join(
                f"{at.acceptance:g} at exit layer {at.exit_layer}" for at in self.assumed
            )
        return (
            f"acceptance: assumed, {points}; for a measured one evaluate the head with "
            "`eesd distill evaluate` and give --head"
        )

    def _assumed_at(self, exit_layer: int) -> float:
        """Returns the assumed acceptance; with a measured head the share of rejected tokens changes
        with the exit layer as in the assumption."""
        measured = self.measured
        rejected = 1.0 - self._interpolated(exit_layer)
        if measured is not None:
            ratio = rejected / (1.0 - self._interpolated(measured.exit_layer))
            rejected = min(1.0, ratio * (1.0 - measured.acceptance.rate))
        return 1.0 - rejected

    def _interpolated(self, exit_layer: int) -> float:
        import numpy as np  # `eesd --help` reads the defaults of this module

        points = sorted(self.assumed, key=lambda at: at.exit_layer)
        layers, shares = zip(*((at.exit_layer, at.acceptance) for at in points), strict=True)
        return float(np.interp(exit_layer, layers, shares))
