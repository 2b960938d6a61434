"""The tables of docs/planning.md: known models on one to four nodes, and small ones on one.

    python -m cluster.planning.tables      # prints them, in Markdown

A test compares the page with this output.
"""

import sys
from collections.abc import Iterator

from cluster.planning.heads import AcceptanceAt, Heads
from cluster.planning.machine import Arithmetic, Machine
from cluster.planning.memory import USUAL_SHARE
from cluster.planning.network import Network
from cluster.planning.planner import Plan
from cluster.planning.presets import GPUS, LINKS, USUAL_EFFICIENCY, LinkName, ShapeName
from cluster.planning.search import search, splits_of
from cluster.planning.shapes import Load, named_shape

MODELS: tuple[ShapeName, ...] = ("llama-2-13b", "codellama-34b", "llama-3-70b")
SMALL_MODELS: tuple[ShapeName, ...] = ("llama-3-8b", "qwen3-14b")
SMALL_NODES = (1, 2, 4, 8)
"""GPUs of the one node of a small model."""
SMALL_LOADS = (1, 32)
BETWEEN_NODES: LinkName = "infiniband"
SLOWER_LINK: LinkName = "ethernet-25"
LOADS = (1, 64)
CONTEXT = 2048
GPUS_PER_NODE = 8

LIMIT_LOADS = (1, 64, 512)
LIMIT_CONTEXT = 512
LIMIT_ACCEPTANCES = (0.3, 0.4, 0.5)
"""Acceptances at every exit layer: heads that guess badly, or text that they were not trained
on."""


def tables() -> str:
    """Returns the table of small models, one for each load of the others, and one of where
    speculation stops paying."""
    return "\n\n".join([_small(), *(_table(num_requests) for num_requests in LOADS), _limits()])


def _small() -> str:
    lines = [
        "Small models on one node:",
        "",
        "| model | GPUs | requests | best plain decoding | tokens/s | best speculation | tokens/s "
        "| over plain |",
        "|---|---|---|---|---|---|---|---|",
        *(row for model in SMALL_MODELS for row in small_rows_of(model)),
    ]
    return "\n".join(lines)


def small_rows_of(model: ShapeName) -> Iterator[str]:
    """Yields the rows of one model in the table of small models."""
    for num_gpus in SMALL_NODES:
        for num_requests in SMALL_LOADS:
            load = Load(num_requests=num_requests, context_tokens=CONTEXT)
            best = _best(model, load, gpus_per_node=num_gpus)
            yield f"| {model} | {num_gpus} | {num_requests} | {_figures(best)} |"


def _limits() -> str:
    columns = [f"acceptance {acceptance}" for acceptance in LIMIT_ACCEPTANCES]
    lines = [
        f"One node, contexts of {LIMIT_CONTEXT} tokens, a low acceptance at every exit layer:",
        "",
        f"| model | requests | best plain decoding | {' | '.join(columns)} |",
        f"|---|---|---|{'---|' * len(columns)}",
        *(row for model in MODELS for row in limit_rows_of(model)),
    ]
    return "\n".join(lines)


def limit_rows_of(model: ShapeName) -> Iterator[str]:
    """Yields the rows of one model in the table of where speculation stops paying."""
    for num_requests in LIMIT_LOADS:
        plans = [
            _best(
                model,
                Load(num_requests=num_requests, context_tokens=LIMIT_CONTEXT),
                heads=Heads(assumed=(AcceptanceAt(exit_layer=1, acceptance=acceptance),)),
            )
            for acceptance in LIMIT_ACCEPTANCES
        ]
        ratios = " | ".join(_ratio(plan) for plan in plans)
        yield f"| {model} | {num_requests} | {plans[0].plain[0].name} | {ratios} |"


def _table(num_requests: int) -> str:
    plural = "s" if num_requests > 1 else ""
    title = f"{num_requests} request{plural} at once, InfiniBand; last column: Ethernet of 25 Gb/s:"
    header = (
        "| model | nodes | best plain decoding | tokens/s | best speculation | tokens/s "
        "| over plain | with 25 Gb/s |\n|---|---|---|---|---|---|---|---|"
    )
    rows = [row for model in MODELS for row in rows_of(model, num_requests)]
    return "\n".join([title, "", header, *rows])


def rows_of(model: ShapeName, num_requests: int) -> Iterator[str]:
    """Yields the rows of one model in the table of one load."""
    load = Load(num_requests=num_requests, context_tokens=CONTEXT)
    for nodes in range(1, 5):
        best = _best(model, load, nodes=nodes)
        slower = _ratio(_best(model, load, nodes=nodes, link=SLOWER_LINK)) if nodes > 1 else ""
        yield f"| {model} | {nodes} | {_figures(best)} | {slower} |"


def _best(
    model: ShapeName,
    load: Load,
    *,
    nodes: int = 1,
    link: LinkName = BETWEEN_NODES,
    gpus_per_node: int = GPUS_PER_NODE,
    heads: Heads = Heads(),  # noqa: B008
) -> Plan:
    shape, gpu = named_shape(model), GPUS["h100"]
    machine = Machine(
        arithmetic=Arithmetic(
            memory_bytes_per_s=gpu.memory_bytes_per_s,
            flops_per_s=gpu.flops_per_s,
            efficiency=USUAL_EFFICIENCY,
        ),
        network=Network(inter=LINKS[link], gpus_per_node=gpus_per_node),
        memory_bytes=USUAL_SHARE * gpu.memory_bytes,
    )
    best, *_ = search(
        shape,
        splits=splits_of(shape, draft_vocab_size=shape.vocab_size // 4),
        machine=machine,
        load=load,
        num_gpus=nodes * gpus_per_node,
        heads=heads,
    )
    return best


def _figures(best: Plan) -> str:
    """Returns the cells of plain decoding and of speculation."""
    return (
        f"{best.plain[0].name} | {best.plain_tokens_per_s:,.0f} | {_name(best)} "
        f"| {best.tokens_per_s:,.0f} | {_ratio(best)}"
    )


def _name(plan: Plan) -> str:
    split = plan.split
    vocabulary = "" if split.draft_vocab_size is None else ", truncated"
    draft = "shared" if split.shares_gpu else f"draft TP {split.draft_tensor_parallel_size}"
    ranks = f"{draft}, verify TP {split.verify_tensor_parallel_size}"
    return (
        f"{plan.num_pipelines} x (N {split.exit_layer}, {ranks}, "
        f"K {plan.best.num_draft_tokens}{vocabulary})"
    )


def _ratio(plan: Plan) -> str:
    return f"{plan.speedup:.2f}" if plan.pays else "does not pay"


if __name__ == "__main__":
    sys.stdout.write(tables() + "\n")
