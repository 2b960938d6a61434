"""`eesd bench offline`: times every controller, plain decoding and transformers in alternation."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eesd_dist.backends.api import engine_on
from eesd_dist.backends.cpu.calls import kernel_clock
from eesd_dist.bench.best_fixed import (
    PromptTimes,
    against_others_choice,
    mean_over_other,
    over_other,
)
from eesd_dist.bench.options import OfflineOptions
from eesd_dist.bench.output import Say, print_report, say_unless
from eesd_dist.bench.round_breakdown import ms_per_round, round_s, without_prefill
from eesd_dist.bench.transformers_model import fastest_transformers_model
from eesd_dist.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SpeculationConfig,
)
from eesd_dist.control.cost import CostModel
from eesd_dist.control.regret import hindsight, position_rates
from eesd_dist.engine.build import build_local_engine
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.layout import layout_of
from eesd_dist.errors import ConfigError
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.text.prompts import Prompt, load_prompts
from eesd_dist.text.tokenizer import Tokenizer
from eesd_dist.types import (
    Outcome,
    Request,
    RequestId,
    RoundStats,
    SamplingParams,
    SpeculationParams,
)

THOMPSON = ("beta", "calibration", "goodput")
LOOKUP = "ngram"
_MAX_LENGTH = 8
Decode = Callable[[Prompt, int], list[int]]


@dataclass(slots=True, kw_only=True)
class Score:
    """Results of one variant on one class of prompts."""

    seconds: float = 0.0
    kernels_s: float = 0.0
    """Part of `seconds` in compiled calls: layers, LM heads, choices."""
    prompt_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of each prompt."""
    tokens: int = 0
    different: int = 0
    rounds: list[RoundStats] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True, kw_only=True)
class OurDecoder:
    """This engine with one speculation setting, one request at a time."""

    engine: EngineCore
    speculation: SpeculationParams
    name: str
    stop_token_ids: tuple[int, ...]
    rounds: list[RoundStats] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    count: int = 0

    def __call__(self, prompt: Prompt, max_tokens: int) -> list[int]:
        self.count += 1
        self.engine.add(
            Request(
                request_id=RequestId(f"{self.name}-{self.count}"),
                prompt=prompt.tokens,
                sampling=SamplingParams(
                    temperature=0.0, max_tokens=max_tokens, stop_token_ids=self.stop_token_ids
                ),
                speculation=self.speculation,
                workload=f"{self.name}/{prompt.workload}",
            )
        )
        tokens: list[int] = []
        while self.engine.has_work:
            result = self.engine.step(wait_s=0.0)
            self.rounds.extend(result.rounds)
            self.outcomes.extend(result.outcomes)
            for emission in result.emissions:
                tokens.extend(emission.tokens)
        return tokens

    def take_logs(self) -> tuple[list[RoundStats], list[Outcome]]:
        rounds, outcomes = self.rounds, self.outcomes
        self.rounds, self.outcomes = [], []
        return rounds, outcomes


def transformers_decoders(
    model: Any, *, exit_layer: int, stop_token_ids: tuple[int, ...], device: torch.device
) -> dict[str, Decode]:
    """Returns transformers' plain and early-exit assisted generation."""
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0

    def decode(prompt: Prompt, max_tokens: int, **options: Any) -> list[int]:
        ids = torch.tensor([prompt.tokens], device=device)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=list(stop_token_ids),
                pad_token_id=0,
                **options,
            )
        return [int(token) for token in out[0, ids.shape[1] :]]

    return {
        "transformers": decode,
        "transformers early exit": lambda prompt, count: decode(
            prompt, count, assistant_early_exit=exit_layer
        ),
    }


def our_decoders(
    engine: EngineCore, *, lengths: Sequence[int], stop_token_ids: tuple[int, ...]
) -> dict[str, Decode]:
    """Returns plain decoding, the fixed lengths and every controller, on one engine."""

    def ours(name: str, speculation: SpeculationParams) -> OurDecoder:
        return OurDecoder(
            engine=engine, speculation=speculation, name=name, stop_token_ids=stop_token_ids
        )

    decoders: dict[str, Decode] = {"plain": ours("plain", SpeculationParams(mode="off"))}
    for length in lengths:
        decoders[f"fixed {length}"] = ours(
            f"fixed {length}", SpeculationParams(controller="fixed", max_draft_tokens=length)
        )
    for controller in (*THOMPSON, LOOKUP):
        decoders[controller] = ours(controller, SpeculationParams(controller=controller))
    return decoders


def run(
    decoders: dict[str, Decode],
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    repeats: int,
    say: Say,
) -> dict[str, dict[str, Score]]:
    """Returns scores by variant and class. Each prompt runs on all variants before the next one."""
    scores: dict[str, dict[str, Score]] = {name: defaultdict(Score) for name in decoders}
    for decode in decoders.values():
        decode(prompts[0], max_tokens)  # warm-up: compiles and allocates
        if isinstance(decode, OurDecoder):
            decode.take_logs()
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts):
            reference: list[int] | None = None
            names = list(decoders)
            turn = (number + repeat) % len(names)
            texts: dict[str, list[int]] = {}
            for name in names[turn:] + names[:turn]:
                decode = decoders[name]
                started, before_s = time.perf_counter(), kernel_clock.spent_s
                texts[name] = decode(prompt, max_tokens)
                took_s = time.perf_counter() - started
                score = scores[name][prompt.workload]
                score.seconds += took_s
                score.prompt_s[number] += took_s
                score.kernels_s += kernel_clock.spent_s - before_s
                score.tokens += len(texts[name])
                if isinstance(decode, OurDecoder):
                    rounds, outcomes = decode.take_logs()
                    score.rounds.extend(rounds)
                    score.outcomes.extend(outcomes)
            reference = texts["plain"]
            for name, text in texts.items():
                scores[name][prompt.workload].different += text != reference
        say(f"repeat {repeat + 1} of {repeats} done")
    return scores


def merged(scores: dict[str, Score]) -> Score:
    total = Score()
    for score in scores.values():
        total.seconds += score.seconds
        total.kernels_s += score.kernels_s
        total.tokens += score.tokens
        total.different += score.different
        total.rounds.extend(score.rounds)
        total.outcomes.extend(score.outcomes)
    return total


def decoding_rate(rounds: Sequence[RoundStats]) -> float:
    """Returns the tokens per second of the rounds without prefill."""
    decoding = without_prefill(rounds)
    return sum(r.num_emitted for r in decoding) / sum(round_s(r) for r in decoding)


def row_of(score: Score, plain: Score, cost: CostModel | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "tokens_per_s": round(score.tokens_per_s, 1),
        "over_plain": round(score.tokens_per_s / plain.tokens_per_s, 3),
        "tokens": score.tokens,
        "texts_unlike_plain": score.different,
    }
    rounds = without_prefill(score.rounds)
    if rounds:
        row["tokens_per_round"] = round(sum(r.num_emitted for r in rounds) / len(rounds), 3)
        row["ms_per_round"] = ms_per_round(rounds)
        row["over_plain_without_prefill"] = round(
            decoding_rate(score.rounds) / decoding_rate(plain.rounds), 3
        )
    if score.kernels_s:
        count = len(score.rounds)
        row["ms_per_round_with_prefill"] = {
            "total": round(1e3 * score.seconds / count, 3),
            "compiled_calls": round(1e3 * score.kernels_s / count, 3),
            "outside": round(1e3 * (score.seconds - score.kernels_s) / count, 3),
        }
    drafted = [o for o in score.outcomes if o.num_drafted]
    if drafted:
        longest = max(o.num_drafted for o in drafted)
        num_accepted = sum(o.num_accepted for o in drafted)
        num_judged = num_accepted + sum(o.num_first_rejected for o in drafted)
        row["accepted_over_drafted"] = round(num_accepted / sum(o.num_drafted for o in drafted), 3)
        row["accepted_over_judged"] = round(num_accepted / max(num_judged, 1), 3)
        row["acceptance_by_position"] = [
            round(rate, 3) for rate in position_rates(drafted, max_length=longest)
        ]
    if drafted and cost is not None:
        seen = hindsight(score.outcomes, cost=cost, max_length=longest)
        row["hindsight"] = {
            "oracle_over_plain": round(seen.oracle_rate / seen.plain_rate, 3),
            "best_fixed_length": seen.best_fixed_length,
            "best_fixed_over_plain": round(seen.best_fixed_rate / seen.plain_rate, 3),
            "oracle_regret": round(seen.oracle_regret, 3),
        }
    return row


def summarise(scores: dict[str, dict[str, Score]], cost: CostModel | None) -> dict[str, Any]:
    """Returns the summary's ratios; the best fixed length of a class that a controller is compared
    with was chosen on other prompts, for each prompt. In the row of a class, `hindsight` has the
    bound that its acceptance and the measured costs allow."""
    total = {name: merged(by_class) for name, by_class in scores.items()}
    plain = total["plain"].tokens_per_s
    fixed = [name for name in scores if name.startswith("fixed")]
    best_thompson = max(THOMPSON, key=lambda name: total[name].tokens_per_s)
    best_fixed = max(fixed, key=lambda name: total[name].tokens_per_s)
    by_class: dict[str, dict[str, Any]] = {}
    against: list[list[PromptTimes]] = []
    for workload in scores["plain"]:
        rate = {name: scores[name][workload].tokens_per_s for name in scores}
        champion = max(fixed, key=lambda name: rate[name])
        seconds = {name: list(scores[name][workload].prompt_s.values()) for name in scores}
        times = against_others_choice(
            seconds[best_thompson], {name: seconds[name] for name in fixed}
        )
        against.append(times)
        over_plain = {
            name: over_other(
                [
                    PromptTimes(ours_s=ours_s, other_s=plain_s)
                    for ours_s, plain_s in zip(seconds[name], seconds["plain"], strict=True)
                ]
            ).as_json()
            for name in (*fixed, *THOMPSON, LOOKUP)
        }
        by_class[workload] = {
            "over_plain": over_plain,
            "best_thompson": row_of(
                scores[best_thompson][workload], scores["plain"][workload], cost
            ),
            "best_fixed": champion,
            "best_fixed_over_plain": round(rate[champion] / rate["plain"], 3),
            "thompson_over_plain": round(rate[best_thompson] / rate["plain"], 3),
            "thompson_over_best_fixed": over_other(times).as_json(),
        }
    summary: dict[str, Any] = {
        "best_thompson": best_thompson,
        "best_thompson_over_plain": round(total[best_thompson].tokens_per_s / plain, 3),
        "best_fixed": best_fixed,
        "best_thompson_over_best_fixed": round(
            total[best_thompson].tokens_per_s / total[best_fixed].tokens_per_s, 3
        ),
        "worst_class_over_plain": min(c["thompson_over_plain"] for c in by_class.values()),
        "thompson_over_best_fixed_mean": mean_over_other(against).as_json(),
        "by_class": by_class,
        "texts_unlike_plain": sum(
            total[name].different for name in scores if not name.startswith("transformers")
        ),
    }
    if "transformers" in total:
        summary["plain_over_transformers"] = round(plain / total["transformers"].tokens_per_s, 3)
    return summary


def main(options: OfflineOptions) -> None:
    if not options.fixed or not set(options.fixed) <= set(range(1, _MAX_LENGTH + 1)):
        raise ConfigError(
            f"--fixed: found {list(options.fixed)}, expected draft lengths from 1 to {_MAX_LENGTH}"
        )
    say = say_unless(options.json)
    max_tokens, repeats = options.max_tokens, options.repeats
    if options.quick:
        max_tokens, repeats = min(max_tokens, 64), 1
    config = EngineConfig(
        model=ModelConfig(
            path=options.model,
            head=options.head,
            dtype=options.dtype,
            numerics=options.numerics,
            device=options.device,
        ),
        cache=CacheConfig(
            num_pages=128, prefix_caching=False, kv_cache_dtype=options.kv_cache_dtype
        ),
        speculation=SpeculationConfig(
            max_draft_tokens=_MAX_LENGTH,
            fixed_length=_MAX_LENGTH,
            stop_rule=options.stop_rule,
        ),
        parallel=ParallelConfig(num_threads=options.threads),
    )
    tokenizer = Tokenizer.load(options.model)
    prompts = load_prompts(tokenizer, options.prompts, limit=options.limit)
    layout = layout_of(config)
    stops = layout.spec.eos_token_ids
    engine = build_local_engine(config, book=BeliefBook())
    decoders = our_decoders(engine, lengths=options.fixed, stop_token_ids=stops)
    machine = engine_on(layout.device).machine(
        layout.device,
        dtype=layout.dtype,
        numerics=options.numerics,
        num_threads=options.threads,
    )
    facts: dict[str, object] = {"machine": machine}
    if not options.skip_transformers:
        theirs = fastest_transformers_model(options.model, device=layout.device, ours=layout.dtype)
        facts["transformers"] = theirs.as_json()
        decoders |= transformers_decoders(
            theirs.model,
            exit_layer=layout.split,
            stop_token_ids=stops,
            device=layout.device,
        )
    scores = run(decoders, prompts, max_tokens=max_tokens, repeats=repeats, say=say)
    plain = merged(scores["plain"])
    rows = {name: row_of(merged(s), plain, engine.learnt_cost) for name, s in scores.items()}
    for name, row in rows.items():
        say(f"{name:26} {row['tokens_per_s']:8.1f} tok/s  {row['over_plain']:6.3f}x plain")
    report = {
        "summary": summarise(scores, engine.learnt_cost),
        "variants": rows,
        "cost_model": engine.learnt_cost.to_json() if engine.learnt_cost is not None else None,
        "settings": {
            "prompts": len(prompts),
            "max_tokens": max_tokens,
            "repeats": repeats,
            "dtype": layout.dtype,
            "numerics": options.numerics,
            "kv_cache_dtype": options.kv_cache_dtype,
            "threads": options.threads,
            "device": str(layout.device),
            "stop_rule": options.stop_rule,
            "exit_layer": layout.split,
            "num_layers": layout.spec.num_layers,
        },
        **facts,
    }
    print_report(report, seed=0)
