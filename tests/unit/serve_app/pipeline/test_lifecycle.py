"""The table of states and actions: exact, total, and enough to bring every pipeline back."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from hypothesis.strategies import booleans, sampled_from

from serve_app.pipeline import lifecycle
from serve_app.pipeline.lifecycle import (
    RULES,
    Action,
    EpochKind,
    SupervisedState,
    next_action,
    table,
)

NONE, FULL, DEGRADED = EpochKind.NONE, EpochKind.FULL, EpochKind.DEGRADED
OVER = {Action.RELEASE, Action.GIVE_UP}

DOCUMENT = Path(__file__).parents[4] / "docs" / "failures.md"
BEGIN, END = "<!-- lifecycle table -->\n", "<!-- end -->"


def _may_start(s: SupervisedState) -> bool:
    return _is_live(s) and s.epoch is NONE and not s.is_head_unloadable and not s.must_wait


def _is_live(s: SupervisedState) -> bool:
    return s.is_deployed and not s.is_hopeless


def _is_well(s: SupervisedState) -> bool:
    return _is_live(s) and not s.is_broken


EXACTLY_WHEN: Mapping[Action, Callable[[SupervisedState], bool]] = {
    Action.RELEASE: lambda s: not s.is_deployed,
    Action.GIVE_UP: lambda s: s.is_deployed and s.is_hopeless,
    Action.END_EPOCH: lambda s: _is_live(s) and s.epoch is not NONE and s.is_broken,
    Action.RESET_HEAD: lambda s: _is_live(s) and s.epoch is NONE and s.is_head_unloadable,
    Action.WAIT: lambda s: (
        _is_live(s) and s.epoch is NONE and s.must_wait and not s.is_head_unloadable
    ),
    Action.START_DEGRADED: lambda s: _may_start(s) and s.can_fall_back,
    Action.START_FULL: lambda s: _may_start(s) and not s.can_fall_back,
    Action.RESTORE_DRAFT: lambda s: _is_well(s) and s.epoch is DEGRADED and not s.is_draft_ready,
    Action.FAIL_BACK: lambda s: _is_well(s) and s.epoch is DEGRADED and s.is_draft_ready,
    Action.WATCH: lambda s: _is_well(s) and s.epoch is FULL,
}


def _all_states() -> Iterator[SupervisedState]:
    fields = [name for name in SupervisedState.__dataclass_fields__ if name != "epoch"]
    for epoch, *values in itertools.product(EpochKind, *[[False, True]] * len(fields)):
        yield SupervisedState(epoch=epoch, **dict(zip(fields, values, strict=True)))


def test_every_state_has_exactly_the_action_whose_premises_hold() -> None:
    assert set(EXACTLY_WHEN) == set(Action)
    states = list(_all_states())
    assert len(states) == 3 * 2**7
    for state in states:
        premised = [action for action, holds in EXACTLY_WHEN.items() if holds(state)]
        assert premised == [next_action(state)], state


def test_every_rule_is_the_first_that_holds_for_some_state_and_has_its_own_action() -> None:
    first = {next(n for n, r in enumerate(RULES) if r.holds(s)) for s in _all_states()}
    assert first == set(range(len(RULES)))
    assert [rule.action for rule in RULES] == list(dict.fromkeys(rule.action for rule in RULES))
    assert {rule.action for rule in RULES} == set(Action)


def test_the_documents_have_the_table() -> None:
    text = DOCUMENT.read_text()
    assert text.count(BEGIN) == 1
    printed = text.split(BEGIN)[1].split(END)[0]
    assert printed == table(), (
        f"the table in {DOCUMENT.name} is old: put the output of "
        "`python -m serve_app.pipeline.lifecycle` between its markers"
    )


class ToyPipeline(RuleBasedStateMachine):
    """A pipeline of two stages that faults meet at any time; the table alone decides what is done.

    A stage is missing, or there; a draft stage that is there may have no weights yet.
    """

    reached: ClassVar[set[Action]] = set()
    """In all runs."""

    MAX_FRUITLESS = 3
    MAX_ACTIONS = 12
    """To a full epoch, from any state, without other faults than those that lie in wait."""

    @initialize(has_fallbacks=sampled_from([True, True, False]), has_promoted_head=booleans())
    def serve_starts_it(self, has_fallbacks: bool, has_promoted_head: bool) -> None:
        self.has_fallbacks = has_fallbacks
        self.has_promoted_head = has_promoted_head
        self.is_deployed = True
        self.is_hopeless = False
        self.epoch = NONE
        self.is_broken = False
        self.is_head_unloadable = False
        self.must_wait = False
        self.has_fallback_failed = False
        self.has_been_full = False
        self.has_draft = False
        self.has_weights = False
        self.has_verify = False
        self.is_silent = False
        """A verify rank makes no progress: it cannot leave, and is killed."""
        self.num_fruitless = 0
        self.is_over = False
        self.failing: set[str] = set()
        """What fails the next time it is tried."""

    @precondition(lambda self: self.is_over)
    @rule()
    def serve_starts_another(self) -> None:
        self.serve_starts_it(self.has_fallbacks, has_promoted_head=True)

    @property
    def state(self) -> SupervisedState:
        is_draft_ready = self.has_draft and self.has_weights
        return SupervisedState(
            is_deployed=self.is_deployed,
            is_hopeless=self.is_hopeless,
            epoch=self.epoch,
            is_broken=self.is_broken,
            is_head_unloadable=self.is_head_unloadable,
            must_wait=self.must_wait,
            can_fall_back=self.has_fallbacks
            and self.has_been_full
            and self.has_verify
            and not is_draft_ready
            and not self.has_fallback_failed,
            is_draft_ready=is_draft_ready,
        )

    @property
    def are_all_there(self) -> bool:
        return self.has_draft and self.has_weights and self.has_verify

    # Faults.

    @precondition(lambda self: not self.is_over)
    @rule()
    def the_draft_stage_dies(self) -> None:
        self.has_draft = self.has_weights = False
        self.is_broken = self.is_broken or self.epoch is FULL

    @precondition(lambda self: not self.is_over)
    @rule()
    def the_verify_stage_dies(self) -> None:
        self.has_verify = self.is_silent = False
        self.is_broken = self.is_broken or self.epoch is not NONE

    @precondition(lambda self: self.epoch is not NONE)
    @rule()
    def a_loop_fails(self) -> None:
        self.is_broken = True

    @precondition(lambda self: self.has_verify and not self.is_over)
    @rule()
    def a_verify_rank_falls_silent(self) -> None:
        self.is_silent = True
        self.is_broken = self.is_broken or self.epoch is not NONE

    @precondition(lambda self: not self.is_over)
    @rule(what=sampled_from(["start", "fallback", "restore", "wrong"]))
    def something_will_fail(self, what: str) -> None:
        self.failing.add(what)

    @precondition(lambda self: not self.is_over and self.has_promoted_head)
    @rule()
    def the_promoted_head_is_removed(self) -> None:
        self.failing.add("promoted head")

    @precondition(lambda self: not self.is_over)
    @rule()
    def serve_takes_it_down(self) -> None:
        self.is_deployed = False

    # What the supervisor does.

    @precondition(lambda self: not self.is_over)
    @rule()
    def it_acts(self) -> None:
        self.act()

    @precondition(lambda self: not self.is_over)
    @rule()
    def no_other_faults_come_for_a_while(self) -> None:
        """Then the pipeline is soon in a full epoch, or over for a reason."""
        for _ in range(self.MAX_ACTIONS):
            if self.act() in {Action.WATCH} | OVER:
                break
        else:
            raise AssertionError(f"no full epoch after {self.MAX_ACTIONS} actions: {self.state}")
        if not self.is_over:
            assert (self.epoch, self.is_broken) == (FULL, False)
            assert self.are_all_there

    def act(self) -> Action:
        action = next_action(self.state)
        self.reached.add(action)
        if action not in OVER:
            assert self.is_deployed
            assert not self.is_hopeless
        match action:
            case Action.RELEASE | Action.GIVE_UP:
                self.end(action)
            case Action.END_EPOCH:
                self.end_epoch()
            case Action.RESET_HEAD:
                assert self.epoch is NONE
                self.has_draft = self.has_weights = self.has_verify = self.is_silent = False
                self.is_head_unloadable = self.has_promoted_head = False
            case Action.WAIT:
                self.must_wait = False
            case Action.START_DEGRADED:
                self.start_degraded()
            case Action.START_FULL:
                self.start_full()
            case Action.RESTORE_DRAFT:
                self.restore_draft()
            case Action.FAIL_BACK:
                assert self.epoch is DEGRADED
                assert self.are_all_there
                self.epoch = NONE
            case Action.WATCH:
                assert self.epoch is FULL
                self.num_fruitless = 0
        return action

    def end(self, action: Action) -> None:
        assert (action is Action.RELEASE) == (not self.is_deployed)
        assert (action is Action.GIVE_UP) == (self.is_deployed and self.is_hopeless)
        self.epoch, self.is_broken, self.is_over = NONE, False, True
        self.has_draft = self.has_weights = self.has_verify = self.is_silent = False

    def end_epoch(self) -> None:
        assert self.epoch is not NONE
        self.kill_silent()
        self.epoch, self.is_broken = NONE, False
        self.num_fruitless += 1
        self.is_hopeless = self.is_hopeless or self.num_fruitless > self.MAX_FRUITLESS

    def kill_silent(self) -> None:
        if self.is_silent:
            self.has_verify = self.is_silent = False

    def begin(self, kind: EpochKind) -> None:
        assert self.epoch is NONE, "an epoch is started while there is one"
        assert not self.is_broken
        assert not self.must_wait
        assert not self.is_head_unloadable
        self.epoch = kind

    def start_degraded(self) -> None:
        assert self.state.can_fall_back
        if "fallback" in self.failing or self.is_silent:
            self.failing.discard("fallback")
            self.has_fallback_failed = True
            self.kill_silent()
            return
        self.begin(DEGRADED)

    def start_full(self) -> None:
        assert not self.is_head_unloadable
        assert not self.state.can_fall_back, "streams wait though fallbacks could decode"
        if "wrong" in self.failing:
            self.is_hopeless = True
        elif "promoted head" in self.failing and self.has_promoted_head:
            self.is_head_unloadable = True
        elif "start" in self.failing or self.is_silent:
            self.failing.discard("start")
            self.must_wait = True
            self.kill_silent()
        else:
            self.has_draft = self.has_weights = self.has_verify = True
            self.has_been_full, self.has_fallback_failed = True, False
            self.begin(FULL)

    def restore_draft(self) -> None:
        assert self.epoch is DEGRADED
        assert not self.state.is_draft_ready
        if "promoted head" in self.failing and self.has_promoted_head:
            self.is_head_unloadable = self.is_broken = True
        elif "restore" in self.failing:
            self.failing.discard("restore")
            self.has_draft, self.has_weights = True, False
            self.must_wait = True
        else:
            self.has_draft = self.has_weights = True

    @invariant()
    def an_epoch_has_its_workers_unless_it_is_broken(self) -> None:
        if self.epoch is not NONE and not self.is_broken:
            assert self.has_verify
            assert not self.is_silent
        if self.epoch is FULL:
            assert self.is_broken or self.are_all_there

    @invariant()
    def only_an_epoch_is_broken_and_nothing_follows_the_end(self) -> None:
        assert not (self.is_broken and self.epoch is NONE)
        if self.is_over:
            assert self.epoch is NONE
            assert not self.is_deployed or self.is_hopeless


def _play(*, max_examples: int, shrinks: bool = True) -> None:
    phases = [phase for phase in Phase if shrinks or phase is Phase.generate]
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        ToyPipeline,
        settings=settings(
            max_examples=max_examples, stateful_step_count=30, phases=phases, database=None
        ),
    )


@pytest.mark.hypothesis
def test_whatever_fails_in_any_order_the_table_leads_to_a_full_epoch_and_uses_every_rule() -> None:
    ToyPipeline.reached.clear()
    _play(max_examples=800)
    assert ToyPipeline.reached == {rule.action for rule in RULES}


@pytest.mark.parametrize("missing", [r.action for r in RULES], ids=lambda action: action.name)
def test_a_table_that_lacks_a_rule_fails(missing: Action, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = tuple(rule for rule in RULES if rule.action is not missing)
    monkeypatch.setattr(lifecycle, "RULES", rules)
    with pytest.raises((AssertionError, StopIteration, ExceptionGroup)):
        _play(max_examples=200, shrinks=False)
