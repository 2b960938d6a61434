"""Figures of one request: the `metrics` object of its response, and the attributes of its span.

Names and definitions of `metrics` are those of vLLM's per-request metrics, so that tools for these
can read them. With several choices the rounds of all are counted together.
"""

from collections.abc import Sequence

from eesd_dist.telemetry import names
from eesd_dist.telemetry.request_spans import Attributes, response_attributes
from eesd_dist.telemetry.spec_stats import SpecStats
from serve_app.openai.generation import ChoiceTally
from serve_app.openai.prepared import Prepared

_MS = 1000.0
_TIMINGS = (
    "time_to_first_token_ms",
    "generation_time_ms",
    "queue_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
)


def metrics_of(prepared: Prepared, tallies: Sequence[ChoiceTally]) -> dict[str, object]:
    return {
        "seed": prepared.seed,
        **timings(tallies, arrived_s=prepared.arrived_s),
        "speculative_decoding": speculation_report(prepared, tallies),
    }


def timings(tallies: Sequence[ChoiceTally], *, arrived_s: float) -> dict[str, float | None]:
    """Time to first token counts from arrival; generation from the first token to the last."""
    firsts = [tally.first_s for tally in tallies if tally.first_s is not None]
    lasts = [tally.last_s for tally in tallies if tally.last_s is not None]
    queued = [tally.queue_s for tally in tallies if tally.queue_s is not None]
    if not firsts:
        return dict.fromkeys(_TIMINGS)
    generation_s = max(lasts) - min(firsts)
    num_tokens = sum(tally.num_tokens for tally in tallies)
    num_gaps = num_tokens - len(firsts)
    values = (
        (min(firsts) - arrived_s) * _MS,
        generation_s * _MS,
        max(queued) * _MS if queued else None,
        (sum(lasts) - sum(firsts)) * _MS / num_gaps if num_gaps else None,
        num_tokens / generation_s if generation_s > 0.0 else None,
    )
    return {
        name: None if value is None else round(value, 3)
        for name, value in zip(_TIMINGS, values, strict=True)
    }


def speculation_report(
    prepared: Prepared, tallies: Sequence[ChoiceTally]
) -> dict[str, object] | None:
    """None when the request switched speculation off."""
    if prepared.max_draft_tokens is None:
        return None
    stats = SpecStats(num_spec_tokens=prepared.max_draft_tokens)
    rounds = [emission for tally in tallies for emission in tally.rounds]
    for emission in rounds:
        stats.observe(emission)
    report: dict[str, object] = {**stats.summary()}
    if prepared.options.detailed_statistics:
        steps = [emission for emission in rounds if emission.num_drafted > 0]
        report["per_step_accepted"] = [step.num_accepted for step in steps]
        report["per_step_drafted"] = [step.num_drafted for step in steps]
    return report


def num_cached_tokens(prepared: Prepared, tallies: Sequence[ChoiceTally]) -> int:
    """Sums, over prompts, the tokens that were cached before any choice of the prompt ran."""
    cached: dict[int, int] = {}
    for choice, tally in zip(prepared.choices, tallies, strict=True):
        num_cached = cached.get(choice.prompt_index, tally.num_cached)
        cached[choice.prompt_index] = min(num_cached, tally.num_cached)
    return sum(cached.values())


def request_attributes(prepared: Prepared, *, controller: str) -> Attributes:
    """`controller`: the service's default."""
    request = prepared.choices[0].request
    attributes: Attributes = {
        names.REQUEST_ID: prepared.request_id,
        names.CHOICES: len(prepared.choices),
        names.WORKLOAD: request.workload,
        names.SPECULATION: request.speculation.mode,
    }
    if request.speculation.mode != "off":
        attributes[names.CONTROLLER] = request.speculation.controller or controller
    return attributes


def total_attributes(prepared: Prepared, tallies: Sequence[ChoiceTally]) -> Attributes:
    """Returns the totals of all choices so far: the request may have failed, or been left."""
    rounds = [emission for tally in tallies for emission in tally.rounds]
    firsts = [tally.first_s for tally in tallies if tally.first_s is not None]
    queued = [tally.queue_s for tally in tallies if tally.queue_s is not None]
    attributes = response_attributes(
        response_id=prepared.response_id,
        model=prepared.model,
        finish_reasons=[tally.finish_reason.value for tally in tallies],
        num_input_tokens=sum(len(prompt) for prompt in prepared.prompts),
        num_output_tokens=sum(tally.num_tokens for tally in tallies),
        num_cached_tokens=num_cached_tokens(prepared, tallies),
    )
    attributes |= {
        names.ROUNDS: len(rounds),
        names.DRAFT_TOKENS: sum(emission.num_drafted for emission in rounds),
        names.ACCEPTED_TOKENS: sum(emission.num_accepted for emission in rounds),
        names.JUDGED_TOKENS: sum(
            min(emission.num_accepted + 1, emission.num_drafted) for emission in rounds
        ),
        names.INTERRUPTIONS: sum(tally.num_interruptions for tally in tallies),
        names.DETOKENIZE_SECONDS: sum(tally.text_s for tally in tallies),
    }
    if firsts:
        attributes[names.FIRST_TOKEN_SECONDS] = min(firsts) - prepared.arrived_s
    if queued:
        attributes[names.QUEUE_SECONDS] = max(queued)
    return attributes
