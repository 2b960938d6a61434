"""`eesd plan`."""

import json
import sys
from dataclasses import replace

from typer import echo

from cluster.link_figures import read_links
from cluster.planning.fitting import fit
from cluster.planning.machine import Machine
from cluster.planning.memory import RankMemory, with_fallbacks
from cluster.planning.options import PlanOptions
from cluster.planning.planner import plan
from cluster.planning.report import as_json, render, render_search, search_as_json
from cluster.planning.search import Heads, search
from cluster.planning.shapes import Load, ModelShape, Split, named_shape, read_shape
from eesd_dist.bench.costs.form import StageCosts, read_costs
from eesd_dist.command_line import run_command
from eesd_dist.errors import ConfigError


def main(options: PlanOptions) -> None:
    """Prints the forecast for one model on one kind of machine."""
    shape = _shape_of(options)
    costs = None if options.costs is None else read_costs(options.costs)
    machine = _machine_of(options, shape, costs)
    load = _load_of(options, costs)
    if options.exit_layer is None or options.search:
        plans = search(
            shape,
            machine=machine,
            load=load,
            num_gpus=options.num_gpus,
            heads=_heads_of(options, shape, costs),
            exit_layer=options.exit_layer,
        )
        text, report = render_search(plans), search_as_json(plans)
    else:
        split = Split(
            exit_layer=options.exit_layer,
            draft_tensor_parallel_size=options.draft_tp,
            verify_tensor_parallel_size=options.verify_tp,
            draft_vocab_size=options.draft_vocab_size,
        )
        found = plan(shape, machine=machine, split=split, load=load)
        memories: tuple[RankMemory, ...] = found.memories
        if options.fallback:
            memories = with_fallbacks(found.memories, shape, split=split, load=load)
        text, report = render(found, memories), as_json(found, memories)
    echo(json.dumps(report) if options.json else text)


def _shape_of(options: PlanOptions) -> ModelShape:
    if (options.config is None) == (options.shape is None):
        raise ConfigError(
            "found both --config and --shape, expected one of them"
            if options.config is not None
            else "found no model: give --config FILE or --shape NAME"
        )
    if options.config is not None:
        return read_shape(options.config, on_cpu=options.on_cpu)
    assert options.shape is not None
    shape = named_shape(options.shape)
    return replace(shape, bytes_per_kv=4) if options.on_cpu else shape


def _machine_of(options: PlanOptions, shape: ModelShape, costs: StageCosts | None) -> Machine:
    machine = options.machine
    if options.links is not None:
        network = replace(machine.network, measured=read_links(options.links))
        machine = replace(machine, network=network)
    return machine if costs is None else fit(machine, shape, costs)


def _heads_of(options: PlanOptions, shape: ModelShape, costs: StageCosts | None) -> Heads:
    measured = shape.vocab_size if costs is None else costs.model.draft_vocab_size
    is_truncated = measured < shape.vocab_size
    usual = measured if is_truncated else max(1, shape.vocab_size // 4)
    return Heads(
        acceptance_at=options.acceptance_at,
        draft_vocab_size=options.draft_vocab_size or usual,
        coverage=options.draft_coverage,
        measured_is_truncated=is_truncated,
    )


def _load_of(options: PlanOptions, costs: StageCosts | None) -> Load:
    load = Load(
        num_requests=options.requests,
        context_tokens=options.context,
        max_draft_tokens=options.max_draft_tokens,
    )
    if options.acceptance is not None:
        return replace(load, acceptance=options.acceptance)
    if costs is None or not costs.survival:
        return load
    survival = costs.survival
    return replace(load, survival=survival, acceptance=survival[-1] ** (1 / len(survival)))


if __name__ == "__main__":
    raise SystemExit(run_command(main, sys.argv[1:], program="python -m cluster.planning.command"))
