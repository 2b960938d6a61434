"""Draws engines: everything that a text must not depend on.

Pages are often so few that requests are preempted, but every request fits.
"""

from collections.abc import Mapping
from random import Random

from eesd_dist.bench.fuzz.cases import Device, EngineSetup, Link, World
from eesd_dist.bench.fuzz.drawing.requests import SHAPES
from eesd_dist.bench.fuzz.models import KnownModel
from eesd_dist.config import DType, SchedulerConfig, SpeculationConfig, TreeConfig
from eesd_dist.control.cost import CostModel
from eesd_dist.control.registry import CONTROLLER_NAMES
from eesd_dist.model.degrees import tensor_parallel_degrees
from eesd_dist.model.spec import ModelSpec

_DEGREES = (1, 2, 3, 4, 6, 8)
_PAGE_SIZES = (4, 8, 16, 32)
_MOST_PROCESSES = 4
"""Maximum number of ranks of a stage in processes, if the run does not require more."""
_STOPPED_S = 3.0
"""Deadline of waits between processes: a stopped one is lost after so long."""


def degrees_of(spec: ModelSpec) -> tuple[int, ...]:
    """Returns the tensor-parallel degrees that this model's heads and channels allow."""
    allowed = tensor_parallel_degrees(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        num_channels=spec.intermediate_size,
        norms_heads_jointly=spec.traits.joint_qk_norm,
    )
    return tuple(degree for degree in _DEGREES if degree in allowed)


def draw_world(
    rng: Random,
    model: KnownModel,
    dtype: DType,
    *,
    device: Device,
    min_verify_ranks: int = 1,
    in_processes: bool = False,
) -> World | None:
    """Returns a world, or None if the model cannot be split among so many ranks."""
    degrees = degrees_of(model.spec)
    verify = [d for d in degrees if d >= min_verify_ranks]
    if not verify:
        return None
    if in_processes:
        verify = [d for d in verify if d <= _MOST_PROCESSES] or verify[:1]
        degrees = degrees[:2]
    # Several ranks cost five times as much per token in threads: there a quarter of the worlds has
    # them, and rather few.
    is_single = not in_processes and min_verify_ranks == 1 and rng.random() < 0.75
    return World(
        model=model.name,
        head=rng.choice(model.heads),
        device=device,
        dtype=dtype,
        draft_ranks=1 if is_single or rng.random() < 0.5 else rng.choice(degrees),
        verify_ranks=1 if is_single else min(rng.choice(verify), rng.choice(verify)),
        page_size=rng.choice(_PAGE_SIZES),
    )


def draw_setup(
    rng: Random,
    *,
    num_needed: int,
    num_all: int,
    is_on_cpu: bool,
    is_single: bool,
    is_plain: bool,
    in_processes: bool = False,
) -> EngineSetup:
    """Draws an engine. `num_needed`: pages of the largest request; `num_all`: pages of all
    requests; `is_plain`: no trees. One of two engines mostly has room and a prefix cache for
    migrated pages."""
    max_draft_tokens = _likely(rng, {0: 1, 1: 2, 2: 2, 3: 3, 4: 3, 5: 3, 6: 3, 8: 3, 10: 2})
    pages = {num_needed: 1, num_needed + 1: 1, 2 * num_needed: 3, num_all // 2: 3, 2 * num_all: 3}
    if not is_single:
        pages[2 * num_all] = 9
    return EngineSetup(
        num_pages=max(num_needed, _likely(rng, pages)),
        prefix_caching=rng.random() < (0.75 if is_single else 0.9),
        scheduler=SchedulerConfig(
            max_running=_likely(rng, {1: 1, 2: 1, 3: 2, 4: 2, 6: 3, 8: 3, 12: 3, 16: 3}),
            max_waiting=10_000,
            token_budget=_likely(rng, {2: 1, 8: 2, 16: 3, 40: 4, 64: 4, 256: 4, 512: 4}),
            prefill_chunk=_likely(rng, {1: 1, 3: 1, 5: 2, 16: 4, 24: 4, 64: 4, 256: 4}),
            overlap=rng.choice((False, True, True, "auto")),
        ),
        speculation=_speculation(rng, max_draft_tokens=max_draft_tokens, is_plain=is_plain),
        cost=_cost(rng, max_draft_tokens=max_draft_tokens),
        link=_link(rng, is_on_cpu=is_on_cpu, in_processes=in_processes),
    )


def _likely(rng: Random, weights: Mapping[int, int]) -> int:
    """Draws by weight: extreme values cost many rounds per token and are rare."""
    return rng.choices(list(weights), list(weights.values()))[0]


def _speculation(rng: Random, *, max_draft_tokens: int, is_plain: bool) -> SpeculationConfig:
    return SpeculationConfig(
        # Alone with prompt lookup: the others never draft what they find.
        controller=rng.choice((*CONTROLLER_NAMES, *["goodput"] * 4)),
        max_draft_tokens=max_draft_tokens,
        tree=TreeConfig(
            shape="none" if is_plain else rng.choice(SHAPES),
            widths=tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 4))),
            branch=rng.randint(1, 4),
            max_nodes=rng.choice((1, 3, 6, 10, 16, 20)),
        ),
        fixed_length=rng.randint(0, 8),
        redraw=rng.choice(("token", "round")),
        discount=rng.choice((0.5, 0.9, 0.98, 1.0)),
        calibration_strength=rng.choice((0.0, 16.0, 256.0)),
        stop_rule=rng.choice(("auto", "bernoulli", "optimal")),
        log_evidence=not is_plain and rng.random() < 0.3,
        seed=rng.randrange(1000),
        learn=rng.random() < 0.8,
        learn_costs=False,  # decisions repeat
    )


def _cost(rng: Random, *, max_draft_tokens: int) -> CostModel:
    """Draws a cost model instead of measuring it: decisions repeat, and every regime occurs."""
    verify_s, seconds = [], rng.uniform(1.0, 4.0)
    for _ in range(max_draft_tokens + 1):
        verify_s.append(seconds)
        seconds += rng.choice((0.0, 0.01, 0.2)) * rng.random()
    step_s = rng.choice((0.02, 0.1, 0.5))
    return CostModel(
        draft_step_s=step_s,
        verify_s=tuple(verify_s),
        round_s=rng.uniform(0.0, 0.5),
        guess_s=step_s * rng.random(),
        request_s=rng.choice((0.0, 0.05)),
    )


def _link(rng: Random, *, is_on_cpu: bool, in_processes: bool) -> Link:
    if in_processes:
        return Link(
            kind="processes",
            sums=rng.choice(("memory", "messages")),
            is_shared=rng.random() < 0.4,
            seed=rng.randrange(1000),
            late_masks=rng.choice((0.0, 0.1, 0.4)),
            timeout_s=_STOPPED_S,
        )
    return Link(
        kind=rng.choice(("inline", "inline", "thread")),
        encoded=is_on_cpu and rng.random() < 0.3,
        sums="memory" if rng.random() < 0.75 else "messages",
        seed=rng.randrange(1000),
        late_masks=rng.choice((0.0, 0.1, 0.4)),
    )
