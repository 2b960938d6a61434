"""Two processes share the draft stage; every token is that of plain decoding on the same stages."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from msgspec import structs

from eesd_dist.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.control.cost import CostModel
from eesd_dist.engine.local import LocalEngine
from eesd_dist.errors import CheckpointError
from eesd_dist.types import (
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TokenId,
    TreeShape,
)
from tests.dist.draft_stage import TIMEOUT_S, Drafter, ranks
from tests.support.drafters import save_head, save_target

pytestmark = pytest.mark.dist

SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=12),
    "filtered": SamplingParams(temperature=1.0, top_p=0.9, max_tokens=12),
    "penalised": SamplingParams(
        temperature=0.8,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.4,
        max_tokens=12,
    ),
}
PLAIN = SpeculationParams(mode="off")


class Pipeline:
    """The ranks of one topology, and a drafter of the latest epoch."""

    def __init__(self, folder: Path, *, verify_ranks: int) -> None:
        torch.set_num_threads(1)
        self.folder = folder
        target = save_target(folder / "target", tail_scale=0.3)
        for name in ("always", "sometimes", "never"):
            save_head(target, folder / name, name)
        # 47 tokens: the LM head shards of the two ranks differ by one row.
        save_head(target, folder / "truncated", "sometimes", draft_vocab=list(range(2, 96, 2)))
        self.config = EngineConfig(
            model=ModelConfig(
                path=target, head=folder / "sometimes", dtype="float32", device="cpu"
            ),
            cache=CacheConfig(num_pages=96, page_size=16),
            scheduler=SchedulerConfig(prefill_chunk=24, overlap=False, max_running=4),
            speculation=SpeculationConfig(max_draft_tokens=4, controller="fixed"),
            parallel=ParallelConfig(
                draft_tensor_parallel_size=2,
                verify_tensor_parallel_size=verify_ranks,
                timeout_s=TIMEOUT_S,
            ),
        )
        self.processes = ExitStack()
        self.first = self.processes.enter_context(ranks(self.config))
        self._number = 0
        self._drafter: Drafter | None = None
        self._count = 0
        self.cost: CostModel | None = None

    def restart(self, *, overlap: bool, head: str = "sometimes") -> None:
        """Starts a new drafting actor with the existing ranks."""
        config = self.config
        cost_file = self.folder / "cost.json" if self.cost is not None else None
        changed = config.model_copy(
            update={
                "model": config.model.model_copy(update={"head": self.folder / head}),
                "scheduler": config.scheduler.model_copy(update={"overlap": overlap}),
                "speculation": config.speculation.model_copy(update={"cost_file": cost_file}),
            }
        )
        self.end()
        self._drafter = Drafter(changed, self.first)
        self.rejoin()
        if self.cost is None:
            self.cost = self.engine.cost
            assert self.cost is not None
            self.cost.save(self.folder / "cost.json")

    def rejoin(self) -> None:
        self._number += 1
        self.drafter.join(self._number)

    def end(self) -> None:
        if self._drafter is not None:
            self._drafter.part.abort()

    @property
    def drafter(self) -> Drafter:
        assert self._drafter is not None
        return self._drafter

    @property
    def engine(self):  # type: ignore[no-untyped-def]
        return self.drafter.part.engine

    def requests(self, name: str, speculation: SpeculationParams, *, count: int) -> list[Request]:
        self._count += 1
        return [
            Request(
                request_id=RequestId(f"{self._count}-{i}"),
                prompt=tuple(TokenId(3 + (7 * i + 5 * at) % 90) for at in range(9 + 11 * i)),
                sampling=structs.replace(SAMPLING[name], seed=50 + i),
                speculation=speculation,
            )
            for i in range(count)
        ]

    def texts(
        self, batch: list[Request], *, break_after: int | None = None
    ) -> tuple[list[list[TokenId]], int, int]:
        """Returns the tokens of each request, and the numbers of drafted and accepted tokens.

        `break_after`: after this many steps, all ranks move to a new epoch.
        """
        for request in batch:
            self.drafter.part.add(request)
        tokens: dict[RequestId, list[TokenId]] = {r.request_id: [] for r in batch}
        drafted = accepted = turns = 0
        while self.engine.has_work:
            if turns == break_after:
                self.end()
                self.rejoin()
            turns += 1
            step = self.drafter.part.step(wait_s=0.01)
            for emission in step.emissions:
                tokens[emission.request_id].extend(emission.tokens)
            drafted += sum(stats.num_drafted for stats in step.rounds)
            accepted += sum(stats.num_accepted for stats in step.rounds)
        return [tokens[request.request_id] for request in batch], drafted, accepted

    def plain(self, name: str, *, count: int) -> list[list[TokenId]]:
        return self.texts(self.requests(name, PLAIN, count=count))[0]


@pytest.fixture(scope="module", params=[1, 2])
def pipeline(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pipeline]:
    stages = Pipeline(tmp_path_factory.mktemp("stages"), verify_ranks=request.param)
    with stages.processes:
        yield stages
        stages.end()


@pytest.mark.parametrize(
    ("overlap", "head", "count", "shapes"),
    [
        (False, "sometimes", 1, ("none", "static", "dynamic")),
        (False, "truncated", 4, ("static", "dynamic", "none")),
        (True, "sometimes", 4, ("dynamic", "none", "static")),
    ],
)
def test_speculation_with_two_draft_ranks_changes_no_token(
    pipeline: Pipeline,
    overlap: bool,
    head: str,
    count: int,
    shapes: tuple[TreeShape, ...],
) -> None:
    pipeline.restart(overlap=overlap, head=head)
    for name, shape in zip(SAMPLING, shapes, strict=True):
        expected = pipeline.plain(name, count=count)
        batch = pipeline.requests(name, SpeculationParams(tree=shape), count=count)
        texts, drafted, _ = pipeline.texts(batch)
        assert texts == expected, (name, shape)
        assert drafted > 8


def test_a_new_epoch_goes_on_with_the_weights_and_the_very_same_tokens(
    pipeline: Pipeline,
) -> None:
    pipeline.restart(overlap=True)
    expected = pipeline.plain("filtered", count=3)
    batch = pipeline.requests("filtered", SpeculationParams(tree="static"), count=3)
    texts, _, _ = pipeline.texts(batch, break_after=5)
    assert texts == expected


def test_another_head_is_taken_by_every_draft_rank(pipeline: Pipeline) -> None:
    pipeline.restart(overlap=False, head="never")
    speculation = SpeculationParams(controller="fixed")
    before = pipeline.texts(pipeline.requests("greedy", speculation, count=2))
    with pytest.raises(CheckpointError, match="digest"):
        pipeline.drafter.leader.load_head(str(pipeline.folder / "always"), sha256="another's")
    pipeline.drafter.leader.load_head(str(pipeline.folder / "always"))
    after = pipeline.texts(pipeline.requests("greedy", speculation, count=2))
    assert before == single_rank(pipeline, "never", speculation)
    assert after == single_rank(pipeline, "always", speculation)
    assert before[2] < after[2]


def single_rank(
    pipeline: Pipeline, head: str, speculation: SpeculationParams
) -> tuple[list[list[TokenId]], int, int]:
    """Returns what one process drafts with a head, and how many of those tokens are accepted."""
    config = pipeline.config
    model = config.model.model_copy(update={"head": pipeline.folder / head})
    llm = LocalEngine(config.model_copy(update={"model": model, "parallel": ParallelConfig()}))
    done = llm.generate(pipeline.requests("greedy", speculation, count=2))
    return (
        [generation.tokens for generation in done],
        sum(sum(generation.drafted) for generation in done),
        sum(sum(generation.accepted) for generation in done),
    )
