"""Draws cases: a pure function of the seed, the case's number and the source.

Engines come in groups that share a world and a pool of requests. Every cycle of groups has each
model in each dtype once, in a random order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random

from eesd_dist.bench.fuzz.cases import Case, Device, EngineSetup, Entry, World
from eesd_dist.bench.fuzz.drawing.engines import draw_setup, draw_world
from eesd_dist.bench.fuzz.drawing.requests import (
    Prompt,
    draw_pool,
    draw_speculation,
    is_plain_choice,
)
from eesd_dist.bench.fuzz.drawing.troubles import draw_troubles
from eesd_dist.bench.fuzz.models import KnownModel
from eesd_dist.config import DType
from eesd_dist.errors import ConfigError
from eesd_dist.types import Request, RequestId

GROUP_SIZE = 10
"""Number of engines that share a world and its plain texts."""
_POOL_SIZE = 20
_LONGEST = 224
"""Maximum of prompt plus answer in tokens, if the model allows more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Source from which cases are drawn."""

    seed: int
    models: tuple[KnownModel, ...]
    prompts: dict[str, tuple[Prompt, ...]]
    """Prompts by model, if it has a tokenizer or its prompts are token ids."""
    dtypes: tuple[DType, ...]
    device: Device
    is_on_cpu: bool
    min_verify_ranks: int = 1
    in_processes: bool = False
    """True if ranks are processes, with faults; other losses are not drawn."""

    def case(self, number: int) -> Case:
        world, model, pool = self._group(number // GROUP_SIZE)
        return self._engine(number, world, model, pool)

    def _group(self, group: int) -> tuple[World, KnownModel, list[Request]]:
        by_name = {model.name: model for model in self.models}
        combinations = list(product(self.models, self.dtypes))
        cycle, offset = divmod(group, len(combinations))
        Random(f"{self.seed}/cycle/{cycle}").shuffle(combinations)
        rng = Random(f"{self.seed}/group/{group}")
        min_ranks = self.min_verify_ranks
        # A model may have fewer heads or channels than that: try the next combination.
        for model, dtype in combinations[offset:] + combinations[:offset]:
            world = draw_world(
                rng,
                model,
                dtype,
                device=self.device,
                min_verify_ranks=min_ranks,
                in_processes=self.in_processes,
            )
            if world is not None:
                break
        else:
            raise _no_model(min_ranks)
        if self.is_on_cpu and Random(f"{self.seed}/kv/{group}").random() < 0.5:
            world = replace(world, kv_cache_dtype="bfloat16")
        model = by_name[world.model]
        pool = draw_pool(
            rng,
            model,
            prompts=self.prompts.get(model.name, ()),
            count=_POOL_SIZE,
            longest=min(model.spec.max_position_embeddings, _LONGEST),
        )
        return world, model, pool

    def _engine(
        self, number: int, world: World, model: KnownModel, pool: Sequence[Request]
    ) -> Case:
        rng = Random(f"{self.seed}/engine/{number}")
        num_engines = 2 if rng.random() < 0.4 else 1
        is_plain = rng.random() < 0.4  # whole rounds are drafted in one compiled call
        if is_plain:
            pool = [request for request in pool if is_plain_choice(request.sampling)] or pool
        entries = _entries(rng, pool, num_engines=num_engines, is_plain=is_plain)
        positions = model.spec.max_position_embeddings
        lengths = [_length(entry.request, positions) for entry in entries]
        pages = [-(-length // world.page_size) for length in lengths]
        # An engine's pages limit its positions: there must be enough for the longest text.
        return Case(
            seed=self.seed,
            number=number,
            world=world,
            engines=tuple(
                self._setup(rng, pages, is_single=num_engines == 1, is_plain=is_plain)
                for _ in range(num_engines)
            ),
            entries=tuple(entries),
            troubles=draw_troubles(
                rng,
                entries,
                num_engines=num_engines,
                processes_of=world if self.in_processes else None,
            ),
        )

    def _setup(
        self, rng: Random, pages: Sequence[int], *, is_single: bool, is_plain: bool
    ) -> EngineSetup:
        """`pages`: number of pages of each request."""
        return draw_setup(
            rng,
            num_needed=max(pages),
            num_all=sum(pages),
            is_on_cpu=self.is_on_cpu,
            is_single=is_single,
            is_plain=is_plain,
            in_processes=self.in_processes,
        )


def _entries(
    rng: Random, pool: Sequence[Request], *, num_engines: int, is_plain: bool
) -> list[Entry]:
    chosen = rng.sample(list(pool), rng.randint(min(5, len(pool)), len(pool)))
    spread = rng.choice((0, 3, 15, 40))
    return [
        Entry(
            name=request.request_id,
            request=replace(
                request,
                request_id=RequestId(f"request-{request.request_id}"),
                speculation=draw_speculation(rng, is_plain=is_plain),
            ),
            turn=rng.randint(0, spread),
            engine=rng.randrange(num_engines),
        )
        for request in chosen
    ]


def _length(request: Request, positions: int) -> int:
    return min(len(request.prompt) + request.sampling.max_tokens, positions)


def _no_model(min_ranks: int) -> ConfigError:
    return ConfigError(
        f"{min_ranks} verify ranks or more are needed, and no model has heads and channels that "
        "they can share: add --random-models 4"
    )
