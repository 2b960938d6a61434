"""`eesd plan`."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace

from typer import echo

from cluster.link_figures import read_links
from cluster.planning.checkpoint import EVALUATION_FILE, head_of_costs, read_head, read_shape
from cluster.planning.fitting import fit
from cluster.planning.heads import USUAL_COVERAGE, AcceptanceAt, Heads, MeasuredHead
from cluster.planning.machine import Machine
from cluster.planning.memory import RankMemory, with_fallbacks
from cluster.planning.options import PlanOptions
from cluster.planning.report import as_json, render, render_search, search_as_json
from cluster.planning.search import search, splits_of
from cluster.planning.shapes import Load, ModelShape, Split, named_shape, on_cpu
from eesd_dist.bench.costs.form import StageCosts, read_costs
from eesd_dist.command_line import run_command
from eesd_dist.errors import ConfigError
from eesd_dist.model.checkpoint_folder import local_folder
from eesd_dist.model.heads.head_files import head_folder


def main(options: PlanOptions) -> None:
    """Prints the forecast for one model on one kind of machine."""
    options.require_effect()
    if options.model is not None:
        options = replace(options, model=local_folder(options.model))
    shape = _shape_of(options)
    costs = None if options.costs is None else read_costs(options.costs)
    machine = _machine_of(options, shape, costs)
    load = Load(
        num_requests=options.requests,
        context_tokens=options.context,
        max_draft_tokens=options.max_draft_tokens,
    )
    heads = _heads_of(options, costs)
    split = None if options.searches else _split_of(options, heads)
    plans = search(
        shape,
        splits=_splits_of(options, shape, heads) if split is None else [split],
        machine=machine,
        load=load,
        num_gpus=_num_nodes(options, split) * options.gpus_per_node,
        heads=heads,
    )
    if split is None:
        text, report = render_search(plans), search_as_json(plans)
    else:
        (plan,) = plans
        memories: tuple[RankMemory, ...] = plan.memories
        if options.fallback:
            memories = with_fallbacks(shape, split=split, load=plan.forecast.load)
        text, report = render(plan, memories), as_json(plan, memories)
    echo(json.dumps(report) if options.json else f"{text}\n\n{heads.describe()}")


def _shape_of(options: PlanOptions) -> ModelShape:
    if (options.model is None) == (options.shape is None):
        raise ConfigError(
            "found both --model and --shape, expected one of them"
            if options.model is not None
            else "found no model: give --model FOLDER or --shape NAME"
        )
    if options.model is not None:
        shape = read_shape(options.model)
    else:
        assert options.shape is not None
        shape = named_shape(options.shape)
    if not options.on_cpu:
        return shape
    return on_cpu(shape, kv_bytes=2 if options.kv_cache_dtype == "bfloat16" else 4)


def _machine_of(options: PlanOptions, shape: ModelShape, costs: StageCosts | None) -> Machine:
    machine = options.machine
    if options.links is not None:
        network = replace(machine.network, measured=read_links(options.links))
        machine = replace(machine, network=network)
    return machine if costs is None else fit(machine, shape, costs)


def _heads_of(options: PlanOptions, costs: StageCosts | None) -> Heads:
    coverage = USUAL_COVERAGE if options.draft_coverage is None else options.draft_coverage
    if options.acceptance is not None:
        flat = AcceptanceAt(exit_layer=1, acceptance=options.acceptance)
        return Heads(assumed=(flat,), coverage=coverage)
    if options.acceptance_at:
        return Heads(assumed=options.acceptance_at, coverage=coverage)
    measured = _measured_head(options, costs)
    if measured is not None and measured.draft_vocab_size and options.draft_coverage is not None:
        raise ConfigError(
            f"found --draft-coverage {coverage}, which would have no effect: the acceptance was "
            "measured with a truncated vocabulary; leave it out, or give --acceptance"
        )
    return Heads(measured=measured, coverage=coverage)


def _measured_head(options: PlanOptions, costs: StageCosts | None) -> MeasuredHead | None:
    if options.head is None and costs is not None and costs.survival:
        return head_of_costs(costs)
    if options.model is None:
        return None
    folder = head_folder(options.model, options.head) or options.model / "exit_head"
    is_required = options.head is not None or options.temperature is not None
    if not is_required and not (folder / EVALUATION_FILE).exists():
        return None
    temperature = 1.0 if options.temperature is None else options.temperature
    return read_head(folder, model=options.model, temperature=temperature)


def _split_of(options: PlanOptions, heads: Heads) -> Split:
    """Returns the one split to judge; where nothing else is given, with the measured head."""
    assert options.exit_layer is not None
    vocabulary, measured = options.draft_vocab_size, heads.measured
    if vocabulary is None and measured is not None and measured.exit_layer == options.exit_layer:
        vocabulary = measured.draft_vocab_size
    return Split(
        exit_layer=options.exit_layer,
        draft_tensor_parallel_size=options.draft_tp or 1,
        verify_tensor_parallel_size=options.verify_tp or 1,
        draft_vocab_size=vocabulary,
        shares_gpu=options.shared_gpu,
    )


def _splits_of(options: PlanOptions, shape: ModelShape, heads: Heads) -> Iterator[Split]:
    vocabulary, measured = options.draft_vocab_size, heads.measured
    if vocabulary is None and measured is not None:
        vocabulary = measured.draft_vocab_size
    return splits_of(
        shape,
        draft_vocab_size=max(1, shape.vocab_size // 4) if vocabulary is None else vocabulary,
        exit_layer=options.exit_layer,
        may_share_gpu=not options.on_cpu,
    )


def _num_nodes(options: PlanOptions, split: Split | None) -> int:
    """Returns the nodes that are bought: those given, or as many as the split needs."""
    if options.nodes is not None:
        return options.nodes
    return 1 if split is None else -(-split.num_gpus // options.gpus_per_node)


if __name__ == "__main__":
    raise SystemExit(run_command(main, sys.argv[1:], program="python -m cluster.planning.command"))
