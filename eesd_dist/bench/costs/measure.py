"""Measures the stages of one or several pipelines by batch and draft length, in turn."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from eesd_dist.bench.costs.calls import measure_attention, measure_products
from eesd_dist.bench.costs.form import MeasuredModel, RoundCost, StageCosts
from eesd_dist.bench.costs.rounds import RoundTimes, run_rounds
from eesd_dist.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.layout import layout_of
from eesd_dist.errors import ConfigError
from eesd_dist.model.degrees import require_degree
from eesd_dist.model.heads.head_config import HeadConfig
from eesd_dist.model.spec import ModelSpec
from eesd_dist.text.prompts import Prompt

_PAGE_SIZE = 32
_TIMEOUT_S = 60.0
_WARM_UP_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RoundSetting:
    """Rounds of one kind."""

    verify_tp: int
    num_requests: int
    num_draft_tokens: int


def engine_config(
    model: Path,
    head: Path | None,
    *,
    settings: Sequence[RoundSetting],
    verify_tp: int,
    longest: int,
) -> EngineConfig:
    """Returns the configuration for these settings. `longest`: tokens of a prompt and its text.

    Raises ConfigError for settings that cannot be run.
    """
    for setting in settings:
        if setting.num_requests < 1 or setting.num_draft_tokens < 0 or setting.verify_tp < 1:
            raise ConfigError(
                f"{setting.num_requests} requests, drafts of {setting.num_draft_tokens} tokens "
                f"and {setting.verify_tp} verify ranks: expected at least 1 request, 0 tokens "
                "and 1 rank"
            )
    spec = ModelSpec.from_folder(model)
    require_degree(
        verify_tp,
        model=spec.architecture,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        num_channels=spec.intermediate_size,
        norms_heads_jointly=spec.traits.joint_qk_norm,
    )
    batch = max(setting.num_requests for setting in settings)
    drafted = max(setting.num_draft_tokens for setting in settings)
    pages = batch * (-(-(longest + drafted + 1) // _PAGE_SIZE) + 1)
    return EngineConfig(
        model=ModelConfig(path=model, head=head),
        cache=CacheConfig(page_size=_PAGE_SIZE, num_pages=pages, prefix_caching=False),
        scheduler=SchedulerConfig(max_running=batch, overlap=False),
        speculation=SpeculationConfig(
            controller="fixed",
            fixed_length=drafted,
            max_draft_tokens=drafted,
        ),
        parallel=ParallelConfig(verify_tensor_parallel_size=verify_tp, timeout_s=_TIMEOUT_S),
    )


def measure_rounds(
    engines: Mapping[int, EngineCore],
    prompts: Sequence[Prompt],
    settings: Sequence[RoundSetting],
    *,
    max_tokens: int,
    times: dict[RoundSetting, RoundTimes],
) -> None:
    """Runs each setting once on the engine of its number of verify ranks; adds to `times`."""
    for setting in settings:
        rounds = run_rounds(
            engines[setting.verify_tp],
            prompts,
            batch=setting.num_requests,
            num_draft_tokens=setting.num_draft_tokens,
            max_tokens=max_tokens,
            label=f"costs-{next(_labels)}",
        )
        times.setdefault(setting, RoundTimes()).rounds.extend(rounds)


_labels = count()


def warm_up(engine: EngineCore, prompts: Sequence[Prompt]) -> None:
    """Runs a few rounds that are not measured."""
    for length in (0, 1):
        run_rounds(
            engine,
            prompts[:1],
            batch=1,
            num_draft_tokens=length,
            max_tokens=_WARM_UP_TOKENS,
            label=f"costs-{next(_labels)}",
        )


def round_costs(times: Mapping[RoundSetting, RoundTimes]) -> tuple[RoundCost, ...]:
    """Returns the usual times of all settings. Raises ConfigError for one without a round."""
    costs = []
    for setting, round_times in times.items():
        if not round_times.rounds:
            raise ConfigError(
                f"no round in which {setting.num_requests} requests draft "
                f"{setting.num_draft_tokens} tokens each: raise --max-tokens, or --num-prompts to "
                "the largest batch"
            )
        costs.append(
            round_times.cost(
                num_requests=setting.num_requests, num_draft_tokens=setting.num_draft_tokens
            )
        )
    return tuple(costs)


def survival_of(times: Mapping[RoundSetting, RoundTimes]) -> tuple[float, ...]:
    """Returns the shares of the longest drafts of which the first i + 1 tokens were accepted."""
    longest = max(setting.num_draft_tokens for setting in times)
    accepted: Counter[int] = Counter()
    num_drafts = 0
    for setting, round_times in times.items():
        if longest and setting.num_draft_tokens == longest:
            more, drafts = round_times.survivors(longest)
            accepted += more
            num_drafts += drafts
    if not num_drafts:
        return ()
    return tuple(round(accepted[at] / num_drafts, 5) for at in range(longest))


def stage_costs(config: EngineConfig, times: Mapping[RoundSetting, RoundTimes]) -> StageCosts:
    """Returns what `eesd plan` reads: rounds of one number of verify ranks, and products and
    attention, which are measured now."""
    layout = layout_of(config)
    spec = layout.spec
    if layout.head_folder is None:
        raise ConfigError(
            f"{config.model.path}: found no exit head, expected one: give its folder with --head"
        )
    head = HeadConfig.read(layout.head_folder, target=spec, target_path=config.model.path)
    return StageCosts(
        model=MeasuredModel(
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            vocab_size=spec.vocab_size,
            exit_layer=layout.split,
            draft_vocab_size=head.draft_vocab_size,
        ),
        device=layout.device.type,
        bytes_per_weight=4 if layout.dtype == "float32" else 2,
        draft_tensor_parallel_size=config.parallel.draft_tensor_parallel_size,
        verify_tensor_parallel_size=config.parallel.verify_tensor_parallel_size,
        num_threads=config.parallel.num_threads,
        products=tuple(measure_products(config)),
        attention=tuple(measure_attention(config)),
        rounds=round_costs(times),
        survival=survival_of(times),
    )
