"""Finds the splits with the most tokens per second on given GPUs.

Tries every exit layer up to a quarter of the model, every pair of degrees that the GPUs hold, a
full and a truncated draft vocabulary, and every draft length. Several pipelines share the requests
where there is room for them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cluster.planning.forecast import degrees_of, plain_forecasts, replicas_of
from cluster.planning.machine import Machine
from cluster.planning.planner import Plan, plan, require_load
from cluster.planning.shapes import AcceptanceAt, Load, ModelShape, Split
from eesd_dist.errors import ConfigError

_MOST_GPUS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The exit heads that a search may assume."""

    acceptance_at: tuple[AcceptanceAt, ...] = ()
    """Empty: the load's acceptance at every exit layer."""
    draft_vocab_size: int
    """Of the truncated head."""
    coverage: float = 0.95
    """Share of the target's tokens that the truncated vocabulary has."""
    measured_is_truncated: bool = False
    """Whether the load's survival was measured with a truncated head, not with a full one."""

    def load_at(self, load: Load, exit_layer: int, *, truncated: bool) -> Load:
        """Returns the load with the acceptance of a head at this exit layer."""
        acceptance, survival = load.acceptance, load.survival
        if self.acceptance_at:
            points = sorted(self.acceptance_at, key=lambda at: at.exit_layer)
            layers, shares = zip(*((at.exit_layer, at.acceptance) for at in points), strict=True)
            acceptance, survival = float(np.interp(exit_layer, layers, shares)), ()
        if truncated and not (survival and self.measured_is_truncated):
            # Each drafted token must be in the vocabulary, those before it included.
            acceptance *= self.coverage
            survival = tuple(
                share * self.coverage**num_tokens for num_tokens, share in enumerate(survival, 1)
            )
        return replace(load, acceptance=acceptance, survival=survival)


def search(
    shape: ModelShape,
    *,
    machine: Machine,
    load: Load,
    num_gpus: int,
    heads: Heads,
    exit_layer: int | None = None,
) -> tuple[Plan, ...]:
    """Returns the plans of all splits that fit, the fastest first.

    Raises ConfigError if none fits.
    """
    require_load(load)
    if not 1 <= num_gpus <= _MOST_GPUS:
        raise ConfigError(f"{num_gpus} GPUs: expected 1 to {_MOST_GPUS} in all")
    if not 0.0 < heads.coverage <= 1.0:
        raise ConfigError(f"draft coverage {heads.coverage}: expected a share above 0, up to 1")
    for at in heads.acceptance_at:
        if not (0.0 <= at.acceptance <= 1.0 and 1 <= at.exit_layer < shape.num_layers):
            raise ConfigError(
                f"--acceptance-at {at.exit_layer}={at.acceptance}: expected an exit layer from 1 "
                f"to {shape.num_layers - 1} and an acceptance from 0 to 1"
            )
    plain = plain_forecasts(shape, machine=machine, load=load, num_gpus=num_gpus)
    found: list[Plan] = []
    refused: ConfigError | None = None
    for split, num_pipelines in _splits(
        shape, machine, num_gpus=num_gpus, heads=heads, exit_layer=exit_layer
    ):
        truncated = split.draft_vocab_size is not None
        try:
            found.append(
                plan(
                    shape,
                    machine=machine,
                    split=split,
                    load=heads.load_at(load, split.exit_layer, truncated=truncated),
                    num_pipelines=min(num_pipelines, load.num_requests),
                    num_gpus=num_gpus,
                    plain=plain,
                )
            )
        except ConfigError as error:
            refused = error
    if not found:
        raise ConfigError(
            f"no split of this model fits {num_gpus} GPUs"
            + (f"; the last one tried: {refused}" if refused else ": a pipeline needs two")
        )
    return tuple(sorted(found, key=_order))


def _order(found: Plan) -> tuple[float, int, int, bool]:
    """The fastest first; of equals the fewest GPUs, the shallowest exit, the full vocabulary."""
    return (
        -round(found.tokens_per_s, 3),
        found.num_pipelines * found.split.num_ranks,
        found.split.exit_layer,
        found.split.draft_vocab_size is not None,
    )


def _splits(
    shape: ModelShape,
    machine: Machine,
    *,
    num_gpus: int,
    heads: Heads,
    exit_layer: int | None,
) -> Iterator[tuple[Split, int]]:
    """Yields splits, each with the number of pipelines that the GPUs hold."""
    deepest = max(1, shape.num_layers // 4)
    layers = (
        range(1, min(deepest, shape.num_layers - 1) + 1) if exit_layer is None else [exit_layer]
    )
    vocabularies: Sequence[int | None] = (None,)
    if heads.draft_vocab_size < shape.vocab_size:
        vocabularies = (None, heads.draft_vocab_size)
    per_node = machine.network.gpus_per_node
    for draft in degrees_of(shape):
        for verify in degrees_of(shape):
            pipelines = replicas_of(draft + verify, num_gpus=num_gpus, gpus_per_node=per_node)
            if not pipelines:
                continue
            for layer in layers:
                for vocabulary in vocabularies:
                    split = Split(
                        exit_layer=layer,
                        draft_tensor_parallel_size=draft,
                        verify_tensor_parallel_size=verify,
                        draft_vocab_size=vocabulary,
                    )
                    yield split, pipelines
