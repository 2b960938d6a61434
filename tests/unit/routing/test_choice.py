"""The pipeline for a request: the one with its prefix, or the least loaded, never one that takes
none."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_dist.routing import Listed, PipelineId, PipelineReport
from eesd_dist.routing.choice import PipelineChoice, PipelineChooser, PrefixMemory, block_digests

BLOCK = 4


class World:
    """Pipelines with given reports, and an ingress that receives them."""

    def __init__(self, *, max_blocks: int = 1000, max_imbalance: float = 4.0) -> None:
        self.now_s = 100.0
        self.chooser = PipelineChooser(
            block_size=BLOCK,
            max_blocks=max_blocks,
            clock=lambda: self.now_s,
            rng=Random(5),
            request_tokens=8.0,
            max_imbalance=max_imbalance,
        )

    def say(
        self,
        name: str,
        *,
        running: int = 0,
        weight: float | None = None,
        is_ready: bool = True,
        draining: bool = False,
        age_s: float = 0.0,
        leader: str = "",
        start_s: float | None = None,
        kv_tokens: int | None = None,
    ) -> None:
        report = PipelineReport(
            pipeline_id=PipelineId(name),
            leader=leader or f"leader of {name}",
            address=f"handle of {name}",
            num_running=running,
            weight=weight,
            start_s=start_s,
            kv_tokens=kv_tokens,
            is_ready=is_ready,
            draining=draining,
        )
        self.chooser.refresh([Listed(report=report, age_s=age_s)])

    def send(self, tokens: Sequence[int], **how: object) -> PipelineChoice:
        choice = self.chooser.choose(tokens, **how)  # type: ignore[arg-type]
        assert choice is not None
        return choice

    def load(self, name: str) -> object:
        return next(d for d in self.chooser.describe() if d["pipeline"] == name)["load"]


def prompt(seed: int, length: int = 40) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def test_a_prefix_is_expected_only_where_it_went_with_the_same_salt() -> None:
    world = World()
    for name in "ab":
        world.say(name)
    text = prompt(1)
    first = world.send(text, cache_salt="one")
    world.chooser.ended(first.pipeline, [*text, *prompt(2)], cache_salt="one")
    assert world.send(text, cache_salt="two").num_cached_tokens == 0
    second = world.send(text, cache_salt="one")
    assert (second.pipeline, second.num_cached_tokens) == (first.pipeline, 36)


def test_a_prefix_is_sent_where_it_went_before_until_too_much_goes_on_there() -> None:
    world = World(max_imbalance=4.0)
    for name in "abcd":
        world.say(name)
    home = world.send(prompt(1)).pipeline
    world.chooser.ended(home)
    choices = [world.send([*prompt(1), 7, i]) for i in range(8)]
    # 40 of 42 tokens are cached, worth 5 live requests of 8 tokens; the bound of 4 is reached
    # first.
    assert [choice.pipeline for choice in choices[:5]] == [home] * 5
    assert [choice.num_cached_tokens for choice in choices[:5]] == [40] * 5
    assert home not in {choice.pipeline for choice in choices[5:]}


def test_a_short_prefix_is_not_worth_the_wait_behind_a_live_request() -> None:
    world = World()
    world.say("a")
    world.send(prompt(1, BLOCK))
    world.say("b")
    assert world.send([*prompt(1, BLOCK), 1, 2, 3]).pipeline == "b"


def test_a_prefix_outweighs_load_by_exactly_what_it_saves() -> None:
    world = World()
    world.say("a")
    world.say("b", is_ready=False)
    world.chooser.ended(world.send(prompt(1)).pipeline)
    world.say("a", running=4)
    world.say("b")
    assert world.send([*prompt(1), 1]).pipeline == "a"  # 1 + 4 * 8 tokens, compared with 41
    world.say("a", running=4)
    assert world.load("a") == 5
    assert world.send([*prompt(1), 1]).pipeline == "b"


def test_a_text_that_was_generated_there_counts_as_prefix() -> None:
    world = World()
    for name in "abcdef":
        world.say(name)
    first = world.send(prompt(1, 3))
    conversation = prompt(1, 3) + prompt(2, 30)
    world.chooser.ended(first.pipeline, conversation)
    second = world.send([*conversation, 5, 6])
    assert (second.pipeline, second.num_cached_tokens) == (first.pipeline, 32)


def test_a_prompt_never_counts_as_cached_to_its_last_token() -> None:
    world = World()
    world.say("a")
    world.send(prompt(1, 2 * BLOCK))
    assert world.send(prompt(1, 2 * BLOCK)).num_cached_tokens == BLOCK


def test_a_pipeline_twice_as_fast_takes_twice_as_many() -> None:
    world = World()
    world.say("slow", weight=30.0)
    world.say("fast", weight=60.0)
    counts = Counter(world.send(prompt(i)).pipeline for i in range(300))
    assert counts[PipelineId("slow")] == pytest.approx(100, abs=5)


def test_among_many_speeds_still_tell() -> None:
    world = World()
    for i in range(4):
        world.say(f"slow {i}", weight=1.0)
        world.say(f"fast {i}", weight=2.0)
    counts = Counter(world.send(prompt(i)).pipeline.split()[0] for i in range(1200))
    assert counts["fast"] / counts[PipelineId("slow")] == pytest.approx(2.0, rel=0.1)


def test_speeds_that_differ_by_noise_are_equal() -> None:
    world = World()
    world.say("a", weight=0.85)
    world.say("b", weight=1.0)
    world.say("c")
    counts = Counter(world.send(prompt(i)).pipeline for i in range(300))
    assert all(count == pytest.approx(100, abs=15) for count in counts.values())


def test_ties_are_broken_by_the_dice() -> None:
    chosen: Counter[str] = Counter()
    world = World()
    for name in "abcd":
        world.say(name)
    for i in range(400):
        choice = world.send(prompt(i))
        chosen[choice.pipeline] += 1
        world.chooser.ended(choice.pipeline)
    assert all(count == pytest.approx(100, abs=40) for count in chosen.values())


def test_a_pipeline_that_is_not_ready_gets_no_request_not_even_of_its_own_prefix() -> None:
    world = World()
    world.say("a")
    world.chooser.ended(world.send(prompt(1)).pipeline)
    world.say("a", is_ready=False)
    assert world.chooser.choose(prompt(1)) is None
    assert world.chooser.choose(prompt(1), only="a") is None
    world.say("b")
    assert {world.send(prompt(1)).pipeline for _ in range(50)} == {"b"}
    world.say("a")
    chosen = world.send(prompt(1), only="a")
    assert (chosen.leader, chosen.address) == ("leader of a", "handle of a")


def test_a_draining_or_excluded_pipeline_gets_a_request_only_if_no_other_is_ready() -> None:
    world = World()

    def takers(**how: object) -> set[str]:
        names: set[str] = set()
        for _ in range(30):
            choice = world.send(prompt(1), **how)
            world.chooser.ended(choice.pipeline)
            names.add(choice.pipeline)
        return names

    world.say("a")
    world.say("b")
    for name in "ab":
        world.chooser.ended(world.send(prompt(1), only=name).pipeline)
    assert takers() == {"a", "b"}
    world.say("a", draining=True)
    assert takers() == {"b"}
    assert takers(only="a") == {"a"}
    world.say("b", is_ready=False)
    assert takers() == {"a"}
    world.say("a")
    world.say("b")
    assert takers(excluded={"a"}) == {"b"}
    assert takers(excluded={"a", "b"}) == {"a", "b"}
    world.say("b", draining=True)
    world.say("a", is_ready=False)
    assert takers(excluded={"b"}) == {"b"}
    world.say("b", is_ready=False)
    assert world.chooser.choose(prompt(1), excluded={"b"}) is None


def test_one_that_failed_is_chosen_again_only_when_it_was_heard_of_since() -> None:
    world = World()
    world.say("a")
    world.now_s += 1.0
    world.chooser.lost(PipelineId("a"))
    world.say("a", age_s=0.5)
    assert world.chooser.choose(prompt(1)) is None
    world.now_s += 1.0
    world.say("a", age_s=0.5)
    assert world.send(prompt(1)).pipeline == "a"


def test_requests_sent_since_the_report_count_in_addition_to_it_and_once() -> None:
    world = World()
    world.say("a", running=2)
    for i in range(3):
        world.now_s += 0.1
        world.send(prompt(i))
    assert world.load("a") == 5
    world.say("a", running=3, age_s=0.15)  # reported after the first, before the others
    assert world.load("a") == 5
    world.now_s += 1.0
    world.say("a", running=5)
    assert world.load("a") == 5
    world.chooser.ended(PipelineId("a"))
    assert world.load("a") == 4


def test_a_directory_that_is_still_empty_is_not_believed_at_once() -> None:
    world = World()
    world.say("a")
    world.now_s += 4.0
    world.chooser.refresh([])
    assert world.send(prompt(1)).pipeline == "a"
    world.now_s += 2.0
    world.chooser.refresh([])
    assert world.chooser.choose(prompt(1)) is None


def test_memory_keeps_the_blocks_used_last_and_no_more() -> None:
    memory = PrefixMemory(max_blocks=6)
    first, second, third = (
        block_digests(prompt(i, 12), block_size=BLOCK, max_blocks=99) for i in range(3)
    )
    memory.remember(first)
    memory.remember(second)
    memory.remember(first)
    memory.remember(third[:2])
    assert len(memory) == 6
    assert memory.num_known(first) == 3
    assert memory.num_known(second) == 1  # removed from its end
    assert memory.num_known(third) == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30))
def test_texts_share_as_many_blocks_as_they_share_leading_tokens(
    left: list[int], right: list[int]
) -> None:
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    memory = PrefixMemory(max_blocks=100)
    memory.remember(block_digests(left, block_size=BLOCK, max_blocks=100))
    digests = block_digests(right, block_size=BLOCK, max_blocks=100)
    assert memory.num_known(digests) == common // BLOCK


def test_a_long_prompt_costs_no_more_than_its_blocks() -> None:
    digests = block_digests(prompt(1, 1000), block_size=BLOCK, max_blocks=10)
    assert len(digests) == 10
    assert all(a != b for a, b in pairwise(digests))


def test_a_router_that_is_silent_for_long_costs_no_memory_and_no_count() -> None:
    world = World()
    world.say("a")
    for _ in range(5_000):
        world.now_s += 0.001
        world.chooser.ended(world.send([1, 2, 3]).pipeline)
    choices = [world.send([1, 2, 3]) for _ in range(3)]
    assert world.load("a") == len(choices)
    assert len(world.chooser._pipelines[PipelineId("a")].changes) <= 1024
    world.now_s += 0.1
    world.say("a", running=7)
    assert world.load("a") == 7
    assert not world.chooser._pipelines[PipelineId("a")].changes


def test_the_leader_of_a_pipeline_is_the_process_of_its_latest_report() -> None:
    world = World()
    world.say("a")
    world.say("b", leader="first")
    world.say("b", leader="second", is_ready=False)
    assert world.chooser.leaders() == {"a": "leader of a", "b": "second"}
    world.now_s += 4.0
    world.say("a")
    world.now_s += 2.0
    world.chooser.refresh([])
    assert world.chooser.leaders() == {"a": "leader of a"}, "b has expired"


def test_the_slowest_start_is_that_of_the_pipelines_that_have_measured_one() -> None:
    world = World()
    assert world.chooser.slowest_start_s() is None
    world.say("a")
    assert world.chooser.slowest_start_s() is None
    world.say("b", start_s=40.0)
    world.say("c", start_s=70.0, is_ready=False)
    assert world.chooser.slowest_start_s() == 70.0


def test_a_pipeline_is_expected_to_cache_as_much_as_its_pages_hold() -> None:
    world = World(max_blocks=3)
    assert world.chooser.kv_tokens() is None
    world.say("a")
    assert world.send(prompt(1)).num_cached_tokens == 0
    assert world.send(prompt(1)).num_cached_tokens == 3 * BLOCK, "none has reported its pages"
    assert world.chooser.kv_tokens() is None
    world.say("a", kv_tokens=8 * BLOCK)
    world.send(prompt(1))
    assert world.send(prompt(1)).num_cached_tokens == 8 * BLOCK
    world.say("b", kv_tokens=6 * BLOCK)
    assert world.chooser.kv_tokens() == 6 * BLOCK
    uncached = World(max_blocks=0)
    uncached.say("a", kv_tokens=8 * BLOCK)
    uncached.send(prompt(1))
    assert uncached.send(prompt(1)).num_cached_tokens == 0
