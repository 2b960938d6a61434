"""Plants: deliberate errors around the real verify stage, which the fuzz must find.

A plant wraps the inputs of a stage: the rounds it verifies, its pages, or its group. The stage and
its checks are unchanged. Plants affect the engine under test, never the plain reference.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from eesd_dist.bench.fuzz.cases import Case
from eesd_dist.bench.fuzz.pipeline import Pipeline
from eesd_dist.bench.fuzz.ranks import VerifyRanks
from eesd_dist.config import EngineConfig
from eesd_dist.engine.verify import VerifyStage
from eesd_dist.page_table import PageTable
from eesd_dist.transport.contracts import RoundHeader, Segment, TensorGroup, VerifyReply
from eesd_dist.transport.group_handles import GroupHandle
from eesd_dist.transport.memory import Verify

# Shapes: T rows, D hidden size, K drafted rows, V vocabulary, B bytes of a page, S slots of a page.


class Plant(Protocol):
    """A test double around the verify stage of one pipeline."""

    def group(self, group: TensorGroup) -> TensorGroup:
        """Returns the group for sums over ranks."""
        ...

    def verify(self, stage: VerifyStage, *, rank: int) -> Verify:
        """Returns the function with which a rank verifies rounds."""
        ...


class ChangedRound:
    """Changes the segment of one request in one round, equally on every rank."""

    def __init__(self, change: Callable[[Segment, Random], Segment | None], rng: Random) -> None:
        """`change` returns None for a segment that it cannot change."""
        self._change = change
        self._first_round = rng.randint(2, 12)
        self._seed = rng.getrandbits(32)

    def group(self, group: TensorGroup) -> TensorGroup:
        return group

    def verify(self, stage: VerifyStage, *, rank: int) -> Verify:
        rng, has_changed = Random(self._seed), False  # every rank draws the same

        def verify(
            header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None
        ) -> VerifyReply:
            nonlocal has_changed
            if not has_changed and header.round_id >= self._first_round:
                changed = self._changed(header, rng)
                if changed is not None:
                    header, has_changed = changed, True
            return stage.verify(header, hidden_TD, draft_probs_KV)

        return verify

    def _changed(self, header: RoundHeader, rng: Random) -> RoundHeader | None:
        for at, segment in enumerate(header.segments):
            changed = self._change(segment, rng)
            if changed is not None:
                segments = (*header.segments[:at], changed, *header.segments[at + 1 :])
                return replace(header, segments=segments)
        return None


def _wrong_page(segment: Segment, rng: Random, *, page_size: int, num_pages: int) -> Segment | None:
    """Replaces one full page of the request by another page."""
    num_full = segment.start // page_size
    if num_full < 1 or num_pages < 2 or segment.num_sampled < 1:
        return None
    at = rng.randrange(num_full)
    pages = list(segment.pages)
    others = sorted(set(range(num_pages)) - {pages[at]})
    pages[at] = rng.choice(others)
    return replace(segment, pages=PageTable(pages))


def _wrong_seed(segment: Segment, rng: Random) -> Segment | None:
    if segment.params.temperature < 0.1 or segment.num_sampled < 1:
        return None
    params = replace(segment.params, seed=segment.params.seed ^ (1 << rng.randrange(32)))
    return replace(segment, params=params)


class SwappedKeys:
    """Swaps the keys of two positions of one request once, in one layer of rank 0."""

    def __init__(self, rng: Random, *, page_size: int) -> None:
        self._page_size = page_size
        self._first_round = rng.randint(2, 12)
        self._rng = rng

    def group(self, group: TensorGroup) -> TensorGroup:
        return group

    def verify(self, stage: VerifyStage, *, rank: int) -> Verify:
        if rank > 0:
            return stage.verify
        has_swapped = False

        def verify(
            header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None
        ) -> VerifyReply:
            nonlocal has_swapped
            if not has_swapped and header.round_id >= self._first_round:
                for segment in header.segments:
                    if segment.start >= 2 and segment.num_sampled > 0:
                        self._swap(stage, segment)
                        has_swapped = True
                        break
            return stage.verify(header, hidden_TD, draft_probs_KV)

        return verify

    @torch.inference_mode()
    def _swap(self, stage: VerifyStage, segment: Segment) -> None:
        paged, size = stage.span.paged, self._page_size
        layer = self._rng.randrange(len(paged.page_bytes))
        first = segment.start - 2  # the newest two: within every window
        places = [(segment.pages[at // size], at % size) for at in (first, first + 1)]
        pages = sorted({page for page, _ in places})
        content_B = paged.read_pages(layer, pages)
        slots_SB = content_B.view(len(pages) * size, -1)
        num_key_bytes = slots_SB.shape[1] // 2  # a slot has keys, then values
        slot, other = (pages.index(page) * size + offset for page, offset in places)
        copy_B = slots_SB[slot, :num_key_bytes].clone()
        slots_SB[slot, :num_key_bytes] = slots_SB[other, :num_key_bytes]
        slots_SB[other, :num_key_bytes] = copy_B
        paged.write_pages(layer, pages, content_B)


class BackwardSums:
    """Sums over ranks from the last to the first."""

    def group(self, group: TensorGroup) -> TensorGroup:
        return _BackwardGroup(group)

    def verify(self, stage: VerifyStage, *, rank: int) -> Verify:
        return stage.verify


class _BackwardGroup:
    """A group that sums in reverse order."""

    def __init__(self, inner: TensorGroup) -> None:
        self._inner = inner

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    def all_reduce(self, x: Tensor) -> Tensor:
        *earlier, running = self._inner.all_gather(x)
        running = running.to(torch.promote_types(x.dtype, torch.float32))
        for summand in reversed(earlier):
            running = running + summand
        return x.copy_(running)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self._inner.all_gather(x)

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor:
        return self._inner.broadcast(x, source=source)


_Make = Callable[[Random, int, int], Plant]

_PLANTS: Mapping[str, _Make] = {
    "page": lambda rng, page_size, num_pages: ChangedRound(
        lambda segment, rng: _wrong_page(segment, rng, page_size=page_size, num_pages=num_pages),
        rng,
    ),
    "key": lambda rng, page_size, _: SwappedKeys(rng, page_size=page_size),
    "sum": lambda *_: BackwardSums(),
    "seed": lambda rng, *_: ChangedRound(_wrong_seed, rng),
}

PLANTS: Sequence[str] = tuple(_PLANTS)
MIN_VERIFY_RANKS: Mapping[str, int] = {"sum": 3}
"""The sum of two numbers is the same in both orders."""


def planted(name: str, *, seed: int = 0) -> type[Pipeline]:
    """Returns a pipeline with this error in its verify stage, the same one in every engine."""

    class PlantedRanks(VerifyRanks):
        def __init__(self, config: EngineConfig, *, in_memory: bool) -> None:
            cache = config.cache
            assert cache.num_pages is not None, "an engine of the fuzz has so many pages"
            self._plant = _PLANTS[name](Random(f"{name} {seed}"), cache.page_size, cache.num_pages)
            super().__init__(config, in_memory=in_memory)

        def group_of(self, handle: GroupHandle) -> TensorGroup:
            return self._plant.group(handle)

        def verifier(self, stage: VerifyStage, *, rank: int) -> Verify:
            return self._plant.verify(stage, rank=rank)

    class PlantedPipeline(Pipeline):
        verify_ranks = PlantedRanks

    return PlantedPipeline


def with_a_spare_page(case: Case) -> Case:
    """Returns the case with one page more in each engine, to confuse with another."""
    engines = tuple(
        dataclasses.replace(setup, num_pages=setup.num_pages + 1) for setup in case.engines
    )
    return dataclasses.replace(case, engines=engines)
