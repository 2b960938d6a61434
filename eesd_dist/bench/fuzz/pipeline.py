"""The engine of one case with its stages: builds, breaks, restores and closes it."""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Protocol

from eesd_dist.bench.fuzz.cases import (
    TIMEOUT_S,
    EngineSetup,
    Fault,
    Link,
    Loss,
    World,
    engine_config,
)
from eesd_dist.bench.fuzz.drawing.grammars import grammars_of
from eesd_dist.bench.fuzz.links import ON_PURPOSE, FaultyChannel, FutureChannel, encoded
from eesd_dist.bench.fuzz.ranks import DraftRanks, VerifyRanks
from eesd_dist.engine.build import build_draft_engine
from eesd_dist.engine.core import EngineCore, StepResult
from eesd_dist.engine.masks import Masks
from eesd_dist.engine.page_store import PageStore
from eesd_dist.errors import PeerLost
from eesd_dist.model.spec import ModelSpec
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.schedule.page_leases import PageReservation
from eesd_dist.transport.memory import MemoryChannel, Verify
from eesd_dist.transport.page_wire import chunks_of


class AnyPipeline(Protocol):
    """Both stages and their engine."""

    @property
    def engine(self) -> EngineCore:
        """The engine; another one after a step in which it was lost."""
        ...

    @property
    def counts(self) -> Counter[str]:
        """Number of losses and of other events."""
        ...

    def step(self) -> StepResult:
        """Runs one turn of the engine's loop, and recovers from losses."""
        ...

    def lose(self, trouble: Loss | Fault) -> bool:
        """Schedules a loss; returns False if this pipeline cannot have it now."""
        ...

    def fits(self, target: "AnyPipeline") -> bool:
        """Returns whether the other pipeline can use pages of this one."""
        ...

    def copy_pages(
        self, target: "AnyPipeline", reservation: PageReservation, *, chunk_bytes: int
    ) -> bool:
        """Copies leased pages to their reserved ones; returns False if that has failed."""
        ...

    def close(self) -> None:
        """Ends both stages after their work. Raises errors of followers."""
        ...

    def abandon(self) -> None:
        """Ends both stages at once."""
        ...


class Pipeline:
    """Both stages and their engine, with ranks in threads."""

    verify_ranks: type[VerifyRanks] = VerifyRanks

    def __init__(self, world: World, setup: EngineSetup, *, folder: Path) -> None:
        config = engine_config(world, setup, folder=folder)
        self._link = setup.link
        in_memory = setup.link.sums == "memory"
        self._verify = self.verify_ranks(config, in_memory=in_memory)
        self._draft = DraftRanks(config, in_memory=in_memory)
        self._channel = _channel(self._link, self._verify.verify)
        self._epoch = 0
        self._loss: Loss | None = None
        self.counts: Counter[str] = Counter()
        self.engine: EngineCore = build_draft_engine(
            config,
            self._channel,
            book=BeliefBook(),
            cost=setup.cost,
            group=self._draft.group,
            commands=self._draft.commands,
            shard=self._draft.shard,
            masks=masks_of(ModelSpec.from_folder(folder), setup.link),
        )

    def step(self) -> StepResult:
        """Runs one turn of the engine's loop. An injected loss ends the turn and is recovered from;
        other errors are raised, a follower's error before the lost peer that it caused."""
        try:
            return self.engine.step(wait_s=0.0)
        except PeerLost as error:
            self._raise_of_followers()
            if self._loss is None or ON_PURPOSE not in str(error):
                raise
            self._restore(fresh=self._loss.fresh)
            return StepResult()

    def lose(self, loss: Loss | Fault) -> bool:
        """Schedules a loss; returns False while another one is pending, and for a fault of a
        process."""
        if self._loss is not None or isinstance(loss, Fault):
            return False
        self._loss = loss
        component = loss.part
        if component == "verify rank" and self._verify.size > 1:
            self._verify.loses_a_rank.set(loss.after)
        elif component == "draft rank" and self._draft.commands is not None:
            self._draft.loses_a_rank.set(loss.after)
        else:
            self._channel.lose_at("receive" if component == "receive" else "send", after=loss.after)
        return True

    def fits(self, target: AnyPipeline) -> bool:
        """Returns whether page layouts agree: a pipeline without drafts has no exit head pages."""
        assert isinstance(target, Pipeline)
        return [store.page_bytes for store in self._stores()] == [
            store.page_bytes for store in target._stores()
        ]

    def copy_pages(
        self, target: AnyPipeline, reservation: PageReservation, *, chunk_bytes: int
    ) -> bool:
        assert isinstance(target, Pipeline)
        source_pages = [page for page, _ in reservation.moves]
        target_pages = [page for _, page in reservation.moves]
        for source_store, target_store in zip(self._stores(), target._stores(), strict=True):
            for chunk in chunks_of(
                source_store.page_bytes, len(source_pages), max_bytes=chunk_bytes
            ):
                target_store.write(chunk, target_pages, source_store.read(chunk, source_pages))
            target_store.settle()
        return True

    def close(self) -> None:
        """Ends both stages. Raises errors of followers that were not raised before."""
        self._channel.close()
        self._draft.close()
        self._verify.close()
        self._raise_of_followers()

    def abandon(self) -> None:
        """Aborts all threads, without waiting for their work."""
        self._verify.end()
        self._draft.end()
        self._channel.close()

    def _restore(self, *, fresh: bool) -> None:
        self._loss = None
        self.counts["lost stages"] += 1
        self.abandon()
        self._epoch += 1
        self._verify.begin(fresh=fresh)
        self._draft.begin()
        self._channel = _channel(self._link, self._verify.verify)
        self.engine.attach(self._channel, epoch=self._epoch)

    def _stores(self) -> list[PageStore]:
        """Returns the page stores of every rank, the draft stage's first."""
        return [*self._draft.stores(), *self._verify.stores()]

    def _errors(self) -> list[BaseException]:
        return [*self._verify.errors, *self._draft.errors]

    def _raise_of_followers(self) -> None:
        for error in self._errors():
            raise error


def masks_of(spec: ModelSpec, link: Link) -> Masks:
    """Makes masks some of which are late, so that requests sit rounds out and drafts are cut."""
    rng = Random(f"{link.seed}/masks")
    return Masks(
        grammars=grammars_of(spec),
        vocab_size=spec.vocab_size,
        is_overdue=lambda: rng.random() < link.late_masks,
    )


def _channel(link: Link, verify: Verify) -> FaultyChannel:
    if link.encoded:
        verify = encoded(verify)
    if link.kind == "thread":
        return FaultyChannel(FutureChannel(verify, timeout_s=TIMEOUT_S))
    return FaultyChannel(MemoryChannel(verify))
