"""Plans as text and as JSON."""

from collections.abc import Sequence

from cluster.planning.forecast import LengthForecast, PlainForecast
from cluster.planning.memory import RankMemory, render_memory
from cluster.planning.planner import Plan

_SHOWN_PLANS = 5
_SHOWN_PLAIN = 4


def render(plan: Plan, memories: Sequence[RankMemory] = ()) -> str:
    """Returns the forecast of one split: its parts, every draft length, plain decoding, memory and
    a conclusion."""
    lines = [
        f"draft step   {_ms(plan.draft_step_s)}   one drafted token of each request",
        f"verify pass  {_ms(plan.verify_pass_s)}   one row of each request",
        f"pipelines    {plan.num_pipelines:>4}          GPUs of each: {plan.split.num_gpus}",
        "",
        "length   draft ms  transfer ms  verify ms   host ms  microbatches   round ms"
        "  tokens/round   tokens/s",
        *(_length_line(row) for row in plan.lengths),
        "",
        *_plain_lines(plan),
        "",
        verdict(plan),
        "",
        render_memory(memories or plan.memories),
    ]
    return "\n".join(lines)


def render_search(plans: Sequence[Plan]) -> str:
    """Returns the best splits, plain decoding, memory of the best split and a conclusion."""
    head = (
        "exit layer  draft TP  verify TP   shared  draft vocabulary  pipelines  GPUs used  length"
        "     acceptance   round ms   tokens/s  tokens/s/GPU  over plain"
    )
    best = plans[0]
    return "\n".join(
        [
            head,
            *(_plan_line(plan) for plan in plans[:_SHOWN_PLANS]),
            "",
            *_plain_lines(best),
            "",
            verdict(best),
            "",
            render_memory(best.memories),
        ]
    )


def verdict(plan: Plan) -> str:
    """Returns whether speculation pays, and what is faster where it does not."""
    threshold = plan.break_even_acceptance
    needed = (
        "no acceptance would change that"
        if threshold is None
        else f"it breaks even at acceptance {threshold:.2f}"
    )
    rate = f"acceptance of {plan.acceptance.rate:.2f}"
    at = f"at the measured {rate}" if plan.acceptance.is_measured else f"at an assumed {rate}"
    if plan.pays:
        length = plan.best.num_draft_tokens
        return (
            f"speculation pays {at}: {plan.speedup:.2f}x with drafts of {length}, compared with "
            f"{_fastest(plan)}; {needed}"
        )
    return (
        f"speculation does not pay here {at}: {plan.speedup:.2f}x, compared with {_fastest(plan)}, "
        f"{plan.plain_tokens_per_s:.0f} tokens/s; {needed}"
    )


def _fastest(plan: Plan) -> str:
    """Returns the fastest plain decoding on all GPUs of the nodes."""
    fastest = plan.plain[0] if plan.plain else None
    if fastest is None or fastest.tokens_per_s < plan.plain_tokens_per_s:
        by = "over the two stages"
    elif fastest.num_replicas > 1:
        by = f"by {fastest.num_replicas} replicas of TP {fastest.num_ranks}"
    else:
        by = f"by TP {fastest.num_ranks}"
    unused = plan.num_gpus - plan.num_used_gpus
    left_over = f" (speculation leaves {unused} of them unused)" if unused else ""
    return f"the fastest plain decoding on {_held(plan)}, {by}{left_over}"


def _held(plan: Plan) -> str:
    """Returns the GPUs of the nodes."""
    nodes = f"{plan.num_nodes} node{'s' if plan.num_nodes > 1 else ''}"
    if plan.num_gpus == 1:
        return "one GPU"
    return f"all {plan.num_gpus} GPUs of {nodes}"


def _length_line(row: LengthForecast) -> str:
    return (
        f"{row.num_draft_tokens:>6}{row.draft_s * 1e3:>11.3f}{row.transfer_s * 1e3:>13.3f}"
        f"{row.verify_s * 1e3:>11.3f}{row.host_s * 1e3:>10.3f}{row.num_microbatches:>14}"
        f"{row.round_s * 1e3:>11.3f}{row.expected_tokens:>14.2f}{row.tokens_per_s:>11.0f}"
    )


def _plan_line(plan: Plan) -> str:
    split, best = plan.split, plan.best
    basis = "measured" if plan.acceptance.is_measured else " assumed"
    vocabulary = "full" if split.draft_vocab_size is None else str(split.draft_vocab_size)
    return (
        f"{split.exit_layer:>10}{split.draft_tensor_parallel_size:>10}"
        f"{split.verify_tensor_parallel_size:>11}{'yes' if split.shares_gpu else 'no':>9}"
        f"{vocabulary:>18}{plan.num_pipelines:>11}{plan.num_used_gpus:>11}"
        f"{best.num_draft_tokens:>8}{plan.acceptance.rate:>6.2f} {basis}{best.round_s * 1e3:>11.3f}"
        f"{plan.tokens_per_s:>11.0f}{plan.tokens_per_s / plan.num_gpus:>14.1f}"
        f"{plan.speedup:>11.2f}x"
    )


def _plain_lines(plan: Plan) -> list[str]:
    if not plan.plain:
        return [f"plain decoding: the model does not fit {_held(plan)} by any degree"]
    return [
        f"plain decoding on {_held(plan)}",
        f"{'replicas':>24}    step ms   tokens/s  tokens/s/GPU",
        *(_plain_line(row, plan.num_gpus) for row in plan.plain[:_SHOWN_PLAIN]),
    ]


def _plain_line(row: PlainForecast, num_gpus: int) -> str:
    return (
        f"{row.name:>24}{row.step_s * 1e3:>11.3f}{row.tokens_per_s:>11.0f}"
        f"{row.tokens_per_s / num_gpus:>14.1f}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:8.3f} ms"


def as_json(plan: Plan, memories: Sequence[RankMemory] = ()) -> dict[str, object]:
    """Returns one plan; times in seconds."""
    split = plan.split
    return {
        "exit_layer": split.exit_layer,
        "draft_tensor_parallel_size": split.draft_tensor_parallel_size,
        "verify_tensor_parallel_size": split.verify_tensor_parallel_size,
        "draft_vocab_size": split.draft_vocab_size,
        "shares_gpu": split.shares_gpu,
        "num_pipelines": plan.num_pipelines,
        "num_used_gpus": plan.num_used_gpus,
        "num_gpus": plan.num_gpus,
        "num_requests": plan.load.num_requests,
        "context_tokens": plan.load.context_tokens,
        "acceptance": plan.acceptance.rate,
        "acceptance_is_measured": plan.acceptance.is_measured,
        "draft_step_s": plan.draft_step_s,
        "verify_pass_s": plan.verify_pass_s,
        "num_draft_tokens": plan.best.num_draft_tokens,
        "tokens_per_s": plan.tokens_per_s,
        "plain_tokens_per_s": plan.plain_tokens_per_s,
        "speedup": plan.speedup,
        "pays": plan.pays,
        "break_even_acceptance": plan.break_even_acceptance,
        "verdict": verdict(plan),
        "lengths": [_fields(row) for row in plan.lengths],
        "plain": [_fields(row) for row in plan.plain],
        "memory": [_fields(row) for row in memories or plan.memories],
    }


def search_as_json(plans: Sequence[Plan]) -> dict[str, object]:
    return {"plans": [as_json(plan) for plan in plans[:_SHOWN_PLANS]]}


def _fields(row: LengthForecast | PlainForecast | RankMemory) -> dict[str, object]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}
