"""Finds the splits with the most tokens per second on the GPUs of given nodes.

Tries every exit layer up to a quarter of the model, every pair of degrees that the GPUs hold, both
stages on one GPU, a full and a truncated draft vocabulary, and every draft length. Several
pipelines share the requests where there is room for them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from cluster.planning.forecast import degrees_of, plain_forecasts, replicas_of
from cluster.planning.heads import Heads
from cluster.planning.machine import Machine
from cluster.planning.planner import Plan, plan, require_load, require_vocabulary
from cluster.planning.shapes import Load, ModelShape, Split
from eesd_dist.errors import ConfigError

_MOST_GPUS = 4096


def search(
    shape: ModelShape,
    *,
    splits: Iterable[Split],
    machine: Machine,
    load: Load,
    num_gpus: int,
    heads: Heads,
) -> tuple[Plan, ...]:
    """Returns the plans of all splits that fit, the fastest first.

    Raises ConfigError if none fits.
    """
    require_load(load)
    heads.require_valid(num_layers=shape.num_layers)
    if not 1 <= num_gpus <= _MOST_GPUS:
        raise ConfigError(f"{num_gpus} GPUs: expected 1 to {_MOST_GPUS} in all")
    plain = plain_forecasts(shape, machine=machine, load=load, num_gpus=num_gpus)
    per_node = machine.network.gpus_per_node
    plans: list[Plan] = []
    reason = ""
    for split in splits:
        room = replicas_of(split.num_gpus, num_gpus=num_gpus, gpus_per_node=per_node)
        if not room:
            reason = reason or (
                f"a pipeline of {split.num_gpus} GPUs on nodes that have {num_gpus}: raise --nodes "
                "or --gpus-per-node, or lower --draft-tp or --verify-tp"
            )
            continue
        try:
            plans.append(
                plan(
                    shape,
                    machine=machine,
                    split=split,
                    load=load,
                    acceptance=heads.acceptance_of(split),
                    num_gpus=num_gpus,
                    num_pipelines=min(room, load.num_requests),
                    plain=plain,
                )
            )
        except ConfigError as error:
            reason = str(error)
    if not plans:
        raise ConfigError(f"no split fits {num_gpus} GPUs; the last one tried: {reason}")
    return tuple(sorted(plans, key=_order))


def _order(row: Plan) -> tuple[float, int, int, bool]:
    """The fastest first; of equals the fewest GPUs, the shallowest exit, the full vocabulary."""
    return (
        -round(row.tokens_per_s, 3),
        row.num_used_gpus,
        row.split.exit_layer,
        row.split.draft_vocab_size is not None,
    )


def splits_of(
    shape: ModelShape,
    *,
    draft_vocab_size: int,
    exit_layer: int | None = None,
    may_share_gpu: bool = True,
) -> Iterator[Split]:
    """Yields the splits that a search tries. `draft_vocab_size`: that of a truncated head.

    Raises ConfigError for a vocabulary that the model does not allow.
    """
    require_vocabulary(shape, draft_vocab_size)
    deepest = max(1, shape.num_layers // 4)
    layers = (
        range(1, min(deepest, shape.num_layers - 1) + 1) if exit_layer is None else [exit_layer]
    )
    vocabularies: Sequence[int | None] = (None,)
    if draft_vocab_size < shape.vocab_size:
        vocabularies = (None, draft_vocab_size)
    for layer in layers:
        for vocabulary in vocabularies:
            base = Split(exit_layer=layer, draft_vocab_size=vocabulary)
            if may_share_gpu:
                for verify in degrees_of(shape):
                    yield replace(base, verify_tensor_parallel_size=verify, shares_gpu=True)
            for draft in degrees_of(shape):
                for verify in degrees_of(shape):
                    yield replace(
                        base,
                        draft_tensor_parallel_size=draft,
                        verify_tensor_parallel_size=verify,
                    )
