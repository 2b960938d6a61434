"""Two stages without a model: the content of a page slot and the tokens of the target are hashes.

The store remembers the tokens from which each slot was computed. A round reads every slot before
its first row, and fails if one does not match the tokens of the request. Pages that are shared
wrongly, freed too early or registered too soon are therefore found at the first read.

The accepted branch of a drafted tree moves to its KV slots in the text: at once in the store of the
draft stage, with the header of the next round in that of the verify stage.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from eesd_dist.schedule.page_leases import KvLayout
from eesd_dist.schedule.pages import PageAllocator
from eesd_dist.schedule.plans import Committed, PlanItem, RoundPlan
from eesd_dist.schedule.scheduler import Scheduler
from eesd_dist.trees import depths_of, path_to
from eesd_dist.types import Emission, FinishReason, PageId, Request, RequestId, TokenId

VOCAB_SIZE = 50
END = TokenId(49)


def toy_token(position: int, seed: int) -> TokenId:
    """Returns the token of the target at a position, which does not depend on earlier tokens."""
    return TokenId(hash((position, seed)) % VOCAB_SIZE)


def toy_answer(request: Request, *, max_model_len: int) -> tuple[list[TokenId], FinishReason]:
    """Returns the text of plain decoding, in the simplest way."""
    sampling = request.sampling
    answer: list[TokenId] = []
    while True:
        token = toy_token(len(request.prompt) + len(answer), sampling.seed)
        may_stop = len(answer) >= sampling.min_tokens
        answer.append(token)
        if may_stop and token in sampling.stop_token_ids:
            return answer, FinishReason.STOP
        if len(answer) == sampling.max_tokens:
            return answer, FinishReason.LENGTH
        if len(request.prompt) + len(answer) == max_model_len:
            return answer, FinishReason.LENGTH


Slot = tuple[PageId, int]


@dataclass
class ToyStages:
    """Runs a plan: fills the pages, drafts, and accepts draft tokens at random."""

    page_size: int
    random: Random
    acceptance: float = 0.6
    keys: dict[Slot, int] = field(default_factory=dict)
    head_keys: dict[Slot, int] = field(default_factory=dict)
    judged: dict[RequestId, list[tuple[Slot, Slot]]] = field(default_factory=dict)
    """The moves of each verdict, to be made after it."""
    pending: list[tuple[Slot, Slot]] = field(default_factory=list)

    def run(self, plan: RoundPlan) -> dict[RequestId, Committed]:
        _move(self.keys, self.pending)
        self.pending.clear()
        results = {}
        for item in plan.items:
            self._read(item)
            if not item.is_final:
                self._write(item, self._known(item))
            elif item.max_nodes > 0:
                results[item.live.request_id] = self._draft_tree(item)
            else:
                results[item.live.request_id] = self._draft_and_verify(item)
        return results

    def settle(self, plan: RoundPlan) -> None:
        """Applies the moves of the verdict."""
        for item in plan.items:
            moves = self.judged.pop(item.live.request_id, [])
            _move(self.head_keys, moves)
            self.pending += moves

    def lose(self) -> None:
        self.keys.clear()
        self.head_keys.clear()
        self.judged.clear()
        self.pending.clear()

    def _known(self, item: PlanItem) -> list[TokenId]:
        return item.live.tokens[: item.start + item.num_known]

    def _draft_and_verify(self, item: PlanItem) -> Committed:
        tokens_before, seed = self._known(item), item.live.request.sampling.seed
        num_drafted = self.random.randint(0, item.max_draft)
        num_accepted = 0
        while num_accepted < num_drafted and self.random.random() < self.acceptance:
            num_accepted += 1
        right = [toy_token(len(tokens_before) + i, seed) for i in range(num_drafted + 1)]
        wrong = [TokenId((token + 1) % VOCAB_SIZE) for token in right]
        self._write(item, tokens_before + right[:num_accepted] + wrong[num_accepted:num_drafted])
        return Committed(
            tokens=tuple(right[: num_accepted + 1]),
            num_drafted=num_drafted,
            num_accepted=num_accepted,
        )

    def _draft_tree(self, item: PlanItem) -> Committed:
        tokens_before, seed = self._known(item), item.live.request.sampling.seed
        self._write(item, tokens_before)
        parents: list[int] = []
        for node in range(self.random.randint(0, item.max_nodes)):
            parent = self.random.randint(-1, node - 1)
            if len(path_to(parents, parent)) < item.max_draft:
                parents.append(parent)
            else:
                break
        path: list[int] = []
        while self.random.random() < self.acceptance:
            last = path[-1] if path else -1
            children = [node for node, parent in enumerate(parents) if parent == last]
            if not children:
                break
            path.append(self.random.choice(children))
        depths = depths_of(parents)
        tokens = [
            TokenId(
                (toy_token(len(tokens_before) + depths[node] - 1, seed) + (node not in path)) % 50
            )
            for node in range(len(parents))
        ]
        for node in range(len(parents)):
            branch = [*tokens_before, *(tokens[at] for at in path_to(parents, node))]
            self._put(item, len(tokens_before) + node, _prefix_hashes(branch)[-1])
        self.judged[item.live.request_id] = [
            (self._slot(item, len(tokens_before) + node), self._slot(item, len(tokens_before) + to))
            for to, node in enumerate(path)
            if node != to
        ]
        right = [toy_token(len(tokens_before) + i, seed) for i in range(len(path) + 1)]
        return Committed(tokens=tuple(right), num_drafted=len(parents), num_accepted=len(path))

    def _slot(self, item: PlanItem, kv_slot: int) -> Slot:
        return item.pages[kv_slot // self.page_size], kv_slot % self.page_size

    def _read(self, item: PlanItem) -> None:
        keys = _prefix_hashes(item.live.tokens)
        for position in range(item.start):
            slot = self._slot(item, position)
            assert self.keys.get(slot) == keys[position], f"position {position} is not its own"
            if item.live.max_draft_tokens > 0:
                assert self.head_keys.get(slot) == keys[position], f"no head at {position}"

    def _write(self, item: PlanItem, tokens: list[TokenId]) -> None:
        for position, key in enumerate(_prefix_hashes(tokens)):
            if position >= item.start:
                self._put(item, position, key)

    def _put(self, item: PlanItem, kv_slot: int, key: int) -> None:
        slot = self._slot(item, kv_slot)
        self.keys[slot] = key
        self.head_keys.pop(slot, None)
        if item.live.max_draft_tokens > 0:
            self.head_keys[slot] = key


def _move(store: dict[Slot, int], moves: list[tuple[Slot, Slot]]) -> None:
    read = [store[source] for source, _ in moves]
    for (_, target), key in zip(moves, read, strict=True):
        store[target] = key


def _prefix_hashes(tokens: list[TokenId]) -> list[int]:
    hashes, last = [], 0
    for token in tokens:
        last = hash((last, token))
        hashes.append(last)
    return hashes


class Ledger:
    """The tokens that each client received, and the finish reason of its stream."""

    def __init__(self) -> None:
        self.answers: dict[RequestId, list[TokenId]] = {}
        self.reasons: dict[RequestId, FinishReason] = {}

    def write(self, emissions: list[Emission]) -> None:
        for emission in emissions:
            assert emission.request_id not in self.reasons, "a stream goes on after its end"
            self.answers.setdefault(emission.request_id, []).extend(emission.tokens)
            if emission.finish_reason is not None:
                self.reasons[emission.request_id] = emission.finish_reason


def run_until_idle(
    scheduler: Scheduler, stages: ToyStages, ledger: Ledger, *, max_rounds: int = 5_000
) -> None:
    """Alternates microbatches: the next round is planned while the results of one are pending."""
    pending: dict[int, tuple[RoundPlan, Mapping[RequestId, Committed]]] = {}
    for turn in range(max_rounds):
        microbatch = turn % scheduler.num_microbatches
        if microbatch in pending:
            plan, results = pending.pop(microbatch)
            stages.settle(plan)
            ledger.write(scheduler.commit(plan, results))
            scheduler.check()
        next_plan = scheduler.plan(microbatch)
        if next_plan is not None:
            pending[microbatch] = (next_plan, stages.run(next_plan))
        if not scheduler.has_work():
            return
    raise AssertionError(f"work is left after {max_rounds} rounds: {scheduler.usage()}")


def kv_layout(*, verify_ranks: int = 2, finds_prefixes: bool = True) -> KvLayout:
    return KvLayout(
        weights="w",
        head="h",
        dtype="float32",
        kv_dtype="float32",
        numerics="invariant",
        split=2,
        num_layers=4,
        draft_ranks=1,
        verify_ranks=verify_ranks,
        page_size=16,
        machine="m",
        finds_prefixes=finds_prefixes,
    )


def make_pages(
    num_pages: int = 64, page_size: int = 4, *, prefix_caching: bool = True
) -> PageAllocator:
    return PageAllocator(num_pages=num_pages, page_size=page_size, prefix_caching=prefix_caching)
