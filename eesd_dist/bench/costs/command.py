"""`eesd bench costs`."""

from collections.abc import Sequence

from eesd_dist.bench.costs.form import RoundCost, write_costs
from eesd_dist.bench.costs.measure import (
    RoundSetting,
    engine_config,
    measure_rounds,
    stage_costs,
    warm_up,
)
from eesd_dist.bench.costs.pipeline import running_pipeline
from eesd_dist.bench.costs.rounds import RoundTimes
from eesd_dist.bench.options import CostsOptions
from eesd_dist.bench.output import Say, print_report, say_unless
from eesd_dist.checks import require_positive
from eesd_dist.text.prompts import load_prompts
from eesd_dist.text.tokenizer import Tokenizer


def main(options: CostsOptions) -> None:
    """Prints a table and the report."""
    require_positive(options, "num_prompts", "max_tokens", "repeats")
    say = say_unless(options.json)
    prompts = load_prompts(
        Tokenizer.load(options.model), options.prompts, limit=options.num_prompts
    )
    settings = [
        RoundSetting(verify_tp=options.verify_tp, num_requests=batch, num_draft_tokens=length)
        for batch in options.batches
        for length in options.lengths
    ]
    config = engine_config(
        options.model,
        options.head,
        settings=settings,
        verify_tp=options.verify_tp,
        longest=max(len(prompt.tokens) for prompt in prompts) + options.max_tokens,
    )
    times: dict[RoundSetting, RoundTimes] = {}
    with running_pipeline(config) as engine:
        warm_up(engine, prompts)
        for repeat in range(options.repeats):
            measure_rounds(
                {options.verify_tp: engine},
                prompts,
                settings,
                max_tokens=options.max_tokens,
                times=times,
            )
            say(f"repeat {repeat + 1} of {options.repeats} done")
    costs = stage_costs(config, times)
    tell_rounds(costs.rounds, say)
    print_report({"costs": write_costs(costs)})


def tell_rounds(rounds: Sequence[RoundCost], say: Say) -> None:
    say("requests  drafted  draft ms  verify ms  round ms  tokens/s")
    for row in rounds:
        say(
            f"{row.num_requests:>8}{row.num_draft_tokens:>9}{row.draft_s * 1e3:>10.3f}"
            f"{row.verify_s * 1e3:>11.3f}{row.round_s * 1e3:>10.3f}"
            f"{row.tokens_per_round / row.round_s:>10.1f}"
        )
