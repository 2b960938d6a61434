"""Draft of one request in one round, and the draft stage's state of the request between rounds.

Tracks which token follows which, the slots of their rows, and which rows the exit head has seen.
Does not depend on models, policies or sampling rules.
"""

# Shapes: T rows, A frontier tokens, D hidden size, V vocabulary.

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from eesd_dist.backends.row_slices import RowSlice, joined
from eesd_dist.engine.drafting.ngrams import NgramIndex
from eesd_dist.engine.masks import ConstrainedText
from eesd_dist.model.attention.rows import RowSegment
from eesd_dist.schedule.plans import PlanItem
from eesd_dist.trees import ROOT, is_chain, path_to
from eesd_dist.types import Evidence, RequestId, Value

MOST_GIVEN = 32
"""Maximum tokens of one prompt lookup."""


class Candidate(Value, frozen=True, kw_only=True):
    """The exit head's next guess, not yet drafted."""

    token: int
    evidence: Evidence
    probs_V: Tensor | None
    """The distribution it was drawn from; only for rejection sampling."""


@dataclass(slots=True, kw_only=True)
class DraftState:
    """The draft stage's state of a request between rounds; a cache that can be dropped anytime."""

    exit_len: int = 0
    """Number of positions with valid keys and values of the exit head."""
    lagging_TD: list[RowSlice] = field(default_factory=list)
    """Rows that the exit head has not read yet, from position exit_len on."""
    num_lagging: int = 0
    """Number of lagging rows."""
    ngrams: NgramIndex = field(default_factory=NgramIndex)
    """N-gram index over the request's tokens."""

    def lag(self, rows_TD: RowSlice) -> None:
        """Adds rows to those that the exit head has not read."""
        self.lagging_TD.append(rows_TD)
        self.num_lagging += rows_TD.count

    def catch_up(self, exit_len: int) -> None:
        """Notes that the exit head has read all rows before a position, and none after it."""
        self.exit_len, self.num_lagging = exit_len, 0
        self.lagging_TD.clear()


@dataclass(slots=True, kw_only=True)
class DraftRun:
    """A request's part of a round: known rows, then drafted rows in the order they were taken."""

    item: PlanItem
    state: DraftState
    request_id: RequestId = field(init=False)
    is_tree: bool = field(init=False)
    """True if alternatives may be drafted; without any the rows still form a chain."""
    rows_TD: list[RowSlice] = field(default_factory=list)
    """The known rows, then the drafted ones."""
    exit_TD: dict[int, Tensor] = field(default_factory=dict)
    """Exit layer -> known rows after it, for a request that wants features of this stage."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """The drafted token before each one; -1: the last known token."""
    ranks: list[int] = field(default_factory=list)
    """0: the exit head's first choice after its parent; r: its r-th alternative."""
    depths: list[int] = field(default_factory=list)
    """Number of drafted tokens on the path to each, including itself."""
    num_guesses: int = 0
    """Levels at which the exit head guessed, taken or not."""
    evidence: list[Evidence] = field(default_factory=list)
    probs_V: list[Tensor] = field(default_factory=list)
    is_lookup: bool = False
    """True if its tokens were found by prompt lookup, and are computed with the known rows."""
    rests: bool = False
    """True if its controller left it out of this round, so that nothing is drafted."""
    frontier: list[int] = field(default_factory=lambda: [ROOT])
    """The newest tokens, which the next guesses follow."""
    exit_AD: RowSlice | None = None
    """The exit head's output at the frontier; None until it has seen those rows."""
    level_TD: list[RowSlice] = field(default_factory=list)
    """Rows of a tree's tokens, level by level."""
    num_seen: int = 0
    """Number of a tree's tokens that the exit head has seen."""
    constraint: ConstrainedText | None = None
    """Constraint of the text, after the known tokens; None: any token may follow."""

    def __post_init__(self) -> None:
        self.request_id = self.item.live.request_id
        self.is_tree = self.item.live.tree != "none"

    @property
    def first_position(self) -> int:
        """Position of the first drafted token."""
        return self.item.start + self.item.num_known

    @property
    def next_kv_slot(self) -> int:
        """KV slot of the next row; for a chain also its position."""
        return self.first_position + len(self.tokens)

    @property
    def room(self) -> int:
        """Number of tokens that may still be drafted."""
        item = self.item
        return (item.max_nodes if self.is_tree else item.max_draft) - len(self.tokens)

    @property
    def may_grow(self) -> bool:
        return self.room > 0 and self.depth_of(self.frontier[0]) < self.item.max_draft

    @property
    def branching(self) -> tuple[int, ...]:
        """The tree's parents; empty if every token follows the one before it."""
        return () if not self.is_tree or is_chain(self.parents) else tuple(self.parents)

    def depth_of(self, frontier_node: int) -> int:
        return 0 if frontier_node == ROOT else self.depths[frontier_node]

    def tokens_to(self, frontier_node: int) -> list[int]:
        """Returns the drafted tokens on the path to a node, including its own."""
        return [self.tokens[node] for node in path_to(self.parents, frontier_node)]

    def mask_after(self, frontier_node: int) -> bytes:
        """Returns the tokens that may follow a token of the draft; empty: any."""
        if self.constraint is None:
            return b""
        return self.constraint.mask_after(self.tokens_to(frontier_node))

    def affords(self, candidate: Candidate, *, parent: int) -> bool:
        """Returns whether there is time in this round for the mask after a candidate."""
        if self.constraint is None:
            return True
        return self.constraint.affords((*self.tokens_to(parent), candidate.token))

    def append(self, candidate: Candidate, *, parent: int, rank: int) -> None:
        """Appends a candidate; all candidates of one level come before those of the next."""
        node = len(self.tokens)
        self.append_token(candidate.token, parent=parent, rank=rank)
        self.evidence.append(candidate.evidence)
        if candidate.probs_V is not None:
            self.probs_V.append(candidate.probs_V)
        is_first = self.depth_of(self.frontier[0]) < self.depths[node]
        self.frontier = [node] if is_first else [*self.frontier, node]

    def take_chain(
        self, tokens: list[int], evidence: list[Evidence], rows_TD: RowSlice, *, num_guesses: int
    ) -> None:
        """Takes a whole draft: its tokens, and the rows of the known tokens and of each. The exit
        head has read the rows before each of its `num_guesses` guesses, one at least."""
        self.rows_TD.append(rows_TD)
        self._set_tokens(tokens)
        self.evidence = evidence
        self.num_guesses = num_guesses
        num_read = self.item.num_known + num_guesses - 1
        self.state.catch_up(self.item.start + num_read)
        if num_read < rows_TD.count:
            self.state.lag(RowSlice(rows_TD.source, rows_TD.first + num_read, rows_TD.end))

    def look_up(self, tokens: Sequence[int]) -> None:
        """Drafts tokens found by prompt lookup."""
        self.is_lookup = True
        self._set_tokens(list(tokens))

    def _set_tokens(self, tokens: list[int]) -> None:
        count = len(tokens)
        self.tokens = tokens
        self.parents, self.ranks = list(range(ROOT, ROOT + count)), [0] * count
        self.depths = list(range(1, count + 1))
        self.frontier = [count - 1]

    def append_token(self, token: int, *, parent: int, rank: int = 0) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.ranks.append(rank)
        self.depths.append(self.depth_of(parent) + 1)

    def last_rows(self, count: int) -> RowSegment:
        """Returns the newest `count` drafted tokens as rows to compute."""
        return RowSegment(self.next_kv_slot - count, count, self.item.pages, self.branching)

    def note_known(self, rows_TD: RowSlice, *, drafts: bool) -> None:
        """Stores the known rows, and those of a lookup, after they were computed; `drafts`: there
        is an exit head that has to read them."""
        state = self.state
        self.rows_TD.append(rows_TD)
        if not drafts or self.item.live.request.speculation.mode != "auto":
            return
        if not state.lagging_TD and state.exit_len < self.item.start:
            state.exit_len = self.item.start  # a cached prefix has the exit head's rows
        state.lag(rows_TD)

    def note_level(self, rows_AD: RowSlice) -> None:
        """Stores the newest tokens' rows after they were computed."""
        self.rows_TD.append(rows_AD)
        self.exit_AD = None
        if self.is_tree:
            self.level_TD.append(rows_AD)
        else:
            self.state.lag(rows_AD)

    @property
    def is_unseen(self) -> bool:
        """True if there are rows that the exit head has not read."""
        return bool(self.state.lagging_TD) or self.num_seen < len(self.tokens) * self.is_tree

    def unseen(self) -> tuple[list[RowSlice], RowSegment]:
        """Returns the rows that the exit head has not read, and where they are. A tree's first
        level is drafted after the known rows were read."""
        state = self.state
        if state.lagging_TD:
            return state.lagging_TD, RowSegment(state.exit_len, state.num_lagging, self.item.pages)
        return self.level_TD[-1:], self.last_rows(self.level_TD[-1].count)

    def note_seen(self, out_TD: RowSlice) -> None:
        """Marks the `unseen` rows as read, with the exit head's output for them."""
        state = self.state
        if state.lagging_TD:
            state.catch_up(state.exit_len + out_TD.count)
            self.exit_AD = RowSlice(out_TD.source, out_TD.end - 1, out_TD.end)
            return
        self.num_seen = len(self.tokens)
        self.exit_AD = out_TD

    def take_lagging(self, *, num_left: int) -> tuple[RowSlice, RowSegment]:
        """Marks the rows that the exit head has not read as read, but the last ones. Returns them,
        and where they are."""
        state, rows_TD = self.state, joined(self.state.lagging_TD)
        count = state.num_lagging - num_left
        segment = RowSegment(state.exit_len, count, self.item.pages)
        state.catch_up(state.exit_len + count)
        if num_left:
            state.lag(RowSlice(rows_TD, count, count + num_left))
        self.exit_AD = None
        return RowSlice(rows_TD, 0, count), segment

    def note_read(self) -> None:
        """Marks a chain's rows as read, without the exit head's output for them."""
        self.state.catch_up(self.state.exit_len + self.state.num_lagging)
        self.exit_AD = None

    def keep_branch(self, path: Sequence[int], *, drafts: bool) -> None:
        """Turns the accepted branch into known text; rows the exit head has not seen lag behind."""
        state = self.state
        if not drafts or not path:
            return
        num_seen = sum(node < self.num_seen for node in path)
        state.exit_len += num_seen
        if num_seen < len(path):
            rows_TD = joined(self.level_TD)
            state.lag(RowSlice.all_of(rows_TD[list(path[num_seen:])]))

    def moves(self, path: Sequence[int], *, page_size: int) -> list[tuple[int, int]]:
        """Returns the KV moves, (from, to) slots, of an accepted branch to its KV slots."""
        pages, first = self.item.pages, self.first_position

        def slot(kv_slot: int) -> int:
            return pages[kv_slot // page_size] * page_size + kv_slot % page_size

        return [
            (slot(first + node), slot(first + to)) for to, node in enumerate(path) if node != to
        ]


def roll_back(state: DraftState, keep: int) -> None:
    """Drops the exit head's rows, seen or lagging, from position `keep` on."""
    if state.exit_len >= keep:
        state.catch_up(keep)
        return
    surplus = state.exit_len + state.num_lagging - keep
    state.num_lagging -= max(surplus, 0)
    while surplus > 0:
        last = state.lagging_TD.pop()
        if last.count > surplus:
            state.lagging_TD.append(RowSlice(last.source, last.first, last.end - surplus))
        surplus -= last.count
