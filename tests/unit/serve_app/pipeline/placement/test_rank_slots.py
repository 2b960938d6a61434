"""Which bundle lacks what, said so that a person can act on it."""

from typing import cast

import pytest
from ray._raylet import node_labels_match_selector  # type: ignore[attr-defined]

from eesd_dist.config import ParallelConfig
from eesd_dist.errors import ConfigError
from serve_app.config import ServiceConfig, service_config
from serve_app.pipeline.placement.gpu_plan import gpu_plan
from serve_app.pipeline.placement.rank_slots import (
    Bundles,
    Node,
    RankSlot,
    could_hold,
    groups_of,
    matches,
    rank_slots,
    related,
    relation_of,
    require_possible,
    require_room,
    why_unplaced,
)
from serve_app.placement_config import PlacementConfig, Strategy


def _slots(num_draft_ranks: int = 1, **resources: float) -> tuple[RankSlot, ...]:
    placement = PlacementConfig.model_validate(
        {"draft": {"num_cpus": 1}, "verify": {"num_cpus": 2, "resources": resources}}
    )
    return rank_slots(
        placement, num_verify_ranks=2, num_draft_ranks=num_draft_ranks, gpus_per_rank=0.0
    )


def _node(
    name: str,
    *,
    free: dict[str, float] | None = None,
    labels: dict[str, str] | None = None,
    **has: float,
) -> Node:
    return Node(
        node_id=f"id-{name}",
        name=name,
        resources=has,
        free=has if free is None else free,
        labels=labels or {},
    )


def _groups(num_draft_ranks: int = 1, **placement: object) -> list[tuple[str, str, int]]:
    config = PlacementConfig.model_validate(placement)
    slots = rank_slots(
        config, num_verify_ranks=2, num_draft_ranks=num_draft_ranks, gpus_per_rank=0.0
    )
    return [(g.stages, g.strategy, len(g.slots)) for g in groups_of(slots, config)]


def test_the_drafting_actor_comes_first_and_ranks_follow_in_order() -> None:
    slots = _slots(num_draft_ranks=2)
    assert [(slot.name, slot.stage, slot.rank) for slot in slots] == [
        ("drafting actor", "draft", None),
        ("draft rank 1", "draft", 1),
        ("verify rank 0", "verify", 0),
        ("verify rank 1", "verify", 1),
    ]
    assert [slot.resources["CPU"] for slot in slots] == [1, 1, 2, 2]


def test_one_group_is_enough_where_one_strategy_says_it_all() -> None:
    stages = "draft and verify"
    assert _groups() == [(stages, "PACK", 3)]
    assert _groups(strategy="STRICT_SPREAD") == [(stages, "STRICT_SPREAD", 3)]
    assert _groups(stages="SPREAD", verify={"strategy": "SPREAD"}) == [(stages, "SPREAD", 3)]
    assert _groups(stages="STRICT_PACK", verify={"strategy": "SPREAD"}) == [
        (stages, "STRICT_PACK", 3)
    ]


def test_stages_that_differ_get_a_group_each_and_the_verify_stage_is_placed_first() -> None:
    assert _groups(stages="STRICT_SPREAD") == [("verify", "PACK", 2), ("draft", "PACK", 1)]
    assert _groups(num_draft_ranks=2, draft={"strategy": "STRICT_PACK"}) == [
        ("verify", "PACK", 2),
        ("draft", "STRICT_PACK", 2),
    ]


def _chosen(
    *kinds: Node, num_verify_ranks: int = 8, num_spares: int = 0, **placement: object
) -> list[tuple[str, str, int]]:
    config = PlacementConfig.model_validate(placement)
    slots = rank_slots(
        config,
        num_verify_ranks=num_verify_ranks,
        num_verify_spares=num_spares,
        gpus_per_rank=1.0,
    )
    return [(g.stages, g.strategy, len(g.slots)) for g in groups_of(slots, config, kinds)]


def test_ranks_of_a_stage_share_a_node_that_is_large_enough_for_all() -> None:
    eight, four = _node("a", CPU=64, GPU=8), _node("b", CPU=64, GPU=4)
    assert _chosen(four, eight) == [("verify", "STRICT_PACK", 8), ("draft", "PACK", 1)]
    in_use = _node("a", CPU=64, GPU=8, free={})
    assert _chosen(in_use) == [("verify", "STRICT_PACK", 8), ("draft", "PACK", 1)]


def test_ranks_that_no_node_holds_fill_whole_nodes_before_the_drafting_actor_is_placed() -> None:
    eight = _node("a", CPU=64, GPU=8)
    whole_nodes = [("verify", "PACK", 16), ("draft", "PACK", 1)]
    assert _chosen(eight, eight, num_verify_ranks=16) == whole_nodes


def test_a_node_with_other_labels_is_not_large_enough() -> None:
    verify = {"verify": {"labels": {"stage": "verify"}}}
    unlabelled, labelled = (
        _node("a", CPU=64, GPU=8, labels=labels) for labels in ({}, {"stage": "verify"})
    )
    assert _chosen(unlabelled, **verify)[0] == ("verify", "PACK", 8)
    assert _chosen(labelled, **verify)[0] == ("verify", "STRICT_PACK", 8)


def test_what_is_set_for_the_ranks_wins_over_the_choice() -> None:
    eight = _node("a", CPU=64, GPU=9)
    assert _chosen(eight, verify={"strategy": "PACK"}) == [("draft and verify", "PACK", 9)]
    assert _chosen(eight, strategy="PACK") == [("draft and verify", "PACK", 9)]
    assert _chosen(eight, verify={"strategy": "SPREAD"})[0] == ("verify", "SPREAD", 8)
    assert _chosen(eight, stages="STRICT_PACK") == [("draft and verify", "STRICT_PACK", 9)]


def test_one_rank_and_its_spare_are_no_group_of_ranks() -> None:
    eight = _node("a", CPU=64, GPU=8)
    assert _chosen(eight, num_verify_ranks=1, num_spares=1) == [("draft and verify", "PACK", 3)]


def test_the_strategy_of_a_stage_of_one_rank_splits_nothing() -> None:
    assert _groups(draft={"strategy": "STRICT_PACK"}) == [("draft and verify", "PACK", 3)]


def test_the_short_form_with_the_long_one_is_refused() -> None:
    for other in ({"stages": "PACK"}, {"verify": {"strategy": "SPREAD"}}):
        with pytest.raises(ConfigError, match=r"strategy is PACK.*drop strategy"):
            service_config(
                {"engine": {"model": {"path": "/m"}}, "placement": {"strategy": "PACK", **other}}
            )


def test_a_part_of_a_gpu_is_for_a_pipeline_of_one_process() -> None:
    def check(num_gpus: float, ranks: int, **placement: object) -> None:
        parallel = {"verify_tensor_parallel_size": ranks}
        service_config(
            {
                "engine": {"model": {"path": "/m"}, "parallel": parallel},
                "placement": {"draft": {"num_gpus": num_gpus}, **placement},
            }
        )

    for ranks, mode in ((1, None), (1, "dedicated"), (2, "shared")):
        with pytest.raises(ConfigError, match=r"draft\.num_gpus is 0\.5.*placement\.mode: shared"):
            check(0.5, ranks, mode=mode)
    check(0.5, 1, mode="shared")
    for num_gpus in (0.0, 1.0):
        check(num_gpus, 2)


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        (
            {"engine": {"parallel": {"fallback": True}}},
            "die with the drafting actor: leave one of them out",
        ),
        ({"placement": {"stages": "STRICT_SPREAD"}}, "the stages have a process in common"),
        ({"placement": {"verify": {"num_cpus": 1}}}, "set placement.draft and"),
        ({"recovery": {"spares": {"verify": 1}}}, "set placement.draft and"),
    ],
)
def test_settings_that_stages_in_one_process_cannot_follow_are_refused(
    tree: dict[str, dict[str, object]], complaint: str
) -> None:
    def config(num_verify_ranks: int) -> ServiceConfig:
        engine = {"model": {"path": "/m"}, **tree.get("engine", {})}
        parallel = {"verify_tensor_parallel_size": num_verify_ranks}
        engine["parallel"] = parallel | cast("dict[str, object]", engine.get("parallel", {}))
        placement = {"mode": "shared", **tree.get("placement", {})}
        return service_config({**tree, "engine": engine, "placement": placement})

    with pytest.raises(ConfigError, match=complaint) as error:
        config(1)
    assert "Value error" not in str(error.value)
    assert "/m" not in str(error.value), "the tree is not repeated"
    if complaint.startswith("set"):
        assert config(2).num_processes == 2


def test_a_selector_that_ray_would_misread_is_refused() -> None:
    placement = {"draft": {"labels": {"zone": "in(a, b)"}}}
    with pytest.raises(ConfigError, match="has a blank"):
        service_config({"engine": {"model": {"path": "/m"}}, "placement": placement})


def test_one_node_for_all_and_a_node_for_each_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r"stages is STRICT_PACK.*verify\.strategy"):
        _groups(stages="STRICT_PACK", verify={"strategy": "STRICT_SPREAD"})


def test_a_related_group_is_kept_from_or_to_the_nodes_of_the_first() -> None:
    config = PlacementConfig.model_validate(
        {"stages": "STRICT_SPREAD", "draft": {"labels": {"eesd.io/stage": "draft"}}}
    )
    slots = rank_slots(config, num_verify_ranks=2, gpus_per_rank=0.0)
    _, draft = groups_of(slots, config)
    apart = related(draft, relation_of(config), to_nodes=["b", "a"])
    assert apart.selectors() == [{"eesd.io/stage": "draft", "ray.io/node-id": "!in(a,b)"}]
    beside = related(draft, "PACK", to_nodes=["b", "a"])
    assert beside.selectors() == [{"eesd.io/stage": "draft", "ray.io/node-id": "in(a,b)"}]


@pytest.mark.parametrize("selector", ["x", "!x", "in(x,y)", "!in(x,y)", "in(y)"])
@pytest.mark.parametrize("value", ["x", "y", "z", None])
def test_labels_match_as_ray_says(selector: str, value: str | None) -> None:
    labels = {} if value is None else {"k": value}
    assert matches(selector, value) == node_labels_match_selector(labels, {"k": selector})


def _all(slots: tuple[RankSlot, ...], strategy: str = "PACK") -> Bundles:
    config = PlacementConfig.model_validate({"strategy": strategy})
    (group,) = groups_of(slots, config)
    return group


def test_a_resource_that_no_node_has_is_named_for_each_bundle_and_node() -> None:
    reason = why_unplaced(_all(_slots(tpu=1)), [_node("a", CPU=8), _node("b", CPU=8, tpu=0.5)])
    assert reason == (
        "verify rank 0, verify rank 1 need CPU 2, tpu 1: node a has tpu 0; node b has tpu 0.5"
    )


def test_only_the_bundle_that_is_one_too_many_is_named() -> None:
    reason = why_unplaced(_all(_slots(tpu=1)), [_node("a", CPU=8), _node("b", CPU=8, tpu=1)])
    assert reason == (
        "verify rank 1 needs CPU 2, tpu 1: node a has tpu 0; node b is filled by verify rank 0"
    )


def test_what_is_there_but_taken_is_told_from_what_is_not_there() -> None:
    nodes = [_node("a", CPU=4, GPU=1, free={"CPU": 4}), _node("b", CPU=4)]
    reason = why_unplaced(_all(_slots(GPU=1)[:2]), nodes)
    assert reason == (
        "verify rank 0 needs CPU 2, GPU 1: node a has GPU 1 of 1 in use; node b has GPU 0"
    )


def test_a_label_that_is_missing_is_named() -> None:
    config = PlacementConfig.model_validate({"draft": {"labels": {"eesd.io/stage": "draft"}}})
    slots = rank_slots(config, num_verify_ranks=1, gpus_per_rank=0.0)
    nodes = [_node("a", CPU=4, labels={"eesd.io/stage": "verify"}), _node("b", CPU=4)]
    reason = why_unplaced(_all(slots), nodes)
    assert reason == (
        "drafting actor needs CPU 0.5, label eesd.io/stage=draft: node a has no label "
        "eesd.io/stage=draft; node b has no label eesd.io/stage=draft"
    )


def test_a_strict_pack_that_is_too_large_for_one_node() -> None:
    reason = why_unplaced(_all(_slots(), "STRICT_PACK"), [_node("a", CPU=4), _node("b", CPU=3)])
    assert reason == (
        "all 3 bundles together (strategy STRICT_PACK) needs CPU 5: node a has CPU 4; "
        "node b has CPU 3"
    )


def test_a_strict_spread_over_too_few_nodes() -> None:
    reason = why_unplaced(_all(_slots(), "STRICT_SPREAD"), [_node("a", CPU=9), _node("b", CPU=9)])
    assert reason == (
        "drafting actor needs CPU 1: node a is for verify rank 0 (strategy STRICT_SPREAD: a node "
        "each); node b is for verify rank 1 (strategy STRICT_SPREAD: a node each)"
    )


def test_a_stage_kept_from_the_nodes_of_the_other_says_so() -> None:
    config = PlacementConfig.model_validate({"stages": "STRICT_SPREAD"})
    _, draft = groups_of(rank_slots(config, num_verify_ranks=2, gpus_per_rank=0.0), config)
    restricted = related(draft, "STRICT_SPREAD", to_nodes=["id-a"])
    node = _node("a", CPU=9)
    assert could_hold(draft, [node])
    assert not could_hold(restricted, [node])
    assert why_unplaced(restricted, [node]) == (
        "drafting actor needs CPU 0.5: node a holds the other stage "
        "(placement.stages keeps the two apart)"
    )


def test_a_large_cluster_is_not_listed_node_by_node() -> None:
    reason = why_unplaced(_all(_slots(tpu=1)), [_node(f"n{i}", CPU=8) for i in range(40)])
    assert reason.endswith("node n3 has tpu 0; and 36 nodes more")


def test_a_cluster_without_nodes_says_so() -> None:
    assert why_unplaced(_all(_slots()), []) == "the cluster has no node that is alive"


def _plan(
    num_gpus: float,
    *,
    draft: int = 1,
    verify: int = 1,
    fallback: bool = False,
    may_grow: bool = False,
    needs_gpu: bool = False,
    placement: dict[str, object] | None = None,
) -> tuple[str, float]:
    parallel = ParallelConfig(
        draft_tensor_parallel_size=draft, verify_tensor_parallel_size=verify, fallback=fallback
    )
    plan = gpu_plan(
        PlacementConfig.model_validate(placement or {}),
        parallel,
        num_gpus=num_gpus,
        needs_gpu=needs_gpu,
        may_grow=lambda: may_grow,
    )
    return plan.mode, plan.gpus_per_rank


def test_ranks_get_a_gpu_each_where_there_are_some() -> None:
    assert _plan(0) == ("dedicated", 0.0)
    assert _plan(0, needs_gpu=True) == ("dedicated", 1.0)  # an autoscaler may bring one
    assert _plan(2) == ("dedicated", 1.0)


def test_first_ranks_share_a_process_where_one_gpu_is_missing_and_no_setting_says_otherwise() -> (
    None
):
    assert _plan(1) == ("shared", 1.0)
    assert _plan(8, verify=8) == ("shared", 1.0)
    assert _plan(15, draft=8, verify=8) == ("shared", 1.0)
    assert _plan(9, verify=8) == _plan(7, verify=8) == ("dedicated", 1.0)
    assert _plan(8, verify=8, may_grow=True) == ("dedicated", 1.0)
    assert _plan(8, verify=8, fallback=True) == ("dedicated", 1.0)
    settings: list[dict[str, object]] = [
        {"mode": "dedicated"},
        {"stages": "STRICT_SPREAD"},
        {"strategy": "SPREAD"},
        {"draft": {"labels": {"stage": "draft"}}},
        {"verify": {"resources": {"tpu": 1}}},
        {"verify": {"num_gpus": 1}},
    ]
    for placement in settings:
        assert _plan(8, verify=8, placement=placement) == ("dedicated", 1.0)
    settings = [{"front": {"stable": 0.001}}, {"draft": {"num_cpus": 1}}, {"strategy": "PACK"}]
    for placement in settings:
        assert _plan(8, verify=8, placement=placement) == ("shared", 1.0)
    assert _plan(0, placement={"mode": "shared"}) == ("shared", 0.0)


def test_a_shared_drafting_actor_leaves_verify_rank_0_no_slot() -> None:
    def names(num_verify_ranks: int, num_draft_ranks: int = 1) -> list[str]:
        slots = rank_slots(
            PlacementConfig(),
            num_verify_ranks=num_verify_ranks,
            num_draft_ranks=num_draft_ranks,
            gpus_per_rank=1.0,
            mode="shared",
            num_draft_spares=1,
            num_verify_spares=1,
        )
        return [slot.name for slot in slots]

    assert names(1) == ["drafting actor", "draft spare 0"]
    assert names(2, 2) == [
        *("drafting actor", "draft rank 1", "verify rank 1"),
        *("draft spare 0", "verify spare 0"),
    ]


def test_a_shared_drafting_actor_is_placed_with_the_verify_ranks_it_sums_with() -> None:
    placement = PlacementConfig(mode="shared")
    slots = rank_slots(placement, num_verify_ranks=4, gpus_per_rank=1.0, mode="shared")
    small, large = _node("a", CPU=8, GPU=3), _node("b", CPU=8, GPU=4)
    (group,) = groups_of(slots, placement, [small, large])
    assert (group.strategy, group.slots) == ("STRICT_PACK", slots)
    (group,) = groups_of(slots, placement, [small])
    assert group.strategy == "PACK"


@pytest.mark.parametrize("stages", ["PACK", "STRICT_PACK", None])
def test_a_pipeline_of_one_process_has_one_placement_group(stages: Strategy | None) -> None:
    placement = PlacementConfig(mode="shared", stages=stages)
    slots = rank_slots(
        placement, num_verify_ranks=1, gpus_per_rank=1.0, mode="shared", num_draft_spares=1
    )
    (group,) = groups_of(slots, placement, [_node("a", CPU=4, GPU=2)])
    assert group.stages == "draft"
    assert group.slots == slots
    require_room([group], relation_of(placement), [_node("a", CPU=4, GPU=2)])


def test_what_the_operator_says_of_gpus_wins() -> None:
    placement = PlacementConfig.model_validate({"verify": {"num_gpus": 2}})
    draft, rank = rank_slots(placement, num_verify_ranks=1, gpus_per_rank=1.0)
    assert (draft.resources["GPU"], rank.resources["GPU"]) == (1.0, 2)


@pytest.mark.parametrize("strategy", ["PACK", "STRICT_PACK"])
@pytest.mark.parametrize("draft", [0.1, 0.2, 0.3, 0.35])
def test_parts_of_a_gpu_fit_one_by_ray_s_arithmetic(draft: float, strategy: Strategy) -> None:
    gpus = {"draft": {"num_gpus": draft}, "verify": {"num_gpus": 1 - draft}}
    placement = PlacementConfig.model_validate({"strategy": strategy, **gpus})
    slots = rank_slots(placement, num_verify_ranks=1, gpus_per_rank=1.0)
    groups = groups_of(slots, placement)
    require_room(groups, strategy, [_node("a", CPU=4, GPU=1)])
    with pytest.raises(ConfigError, match="no room for a pipeline"):
        require_room(groups, strategy, [_node("a", CPU=4, GPU=0.9999)])


APART = {"draft": {"labels": {"stage": "draft"}}, "verify": {"labels": {"stage": "verify"}}}


def test_stages_that_labels_keep_apart_are_one_group_which_an_autoscaler_sees_as_a_whole() -> None:
    assert _groups(stages="STRICT_SPREAD", **APART) == [("draft and verify", "PACK", 3)]
    spread = {**APART, "verify": {**APART["verify"], "strategy": "STRICT_SPREAD"}}
    assert _groups(stages="STRICT_SPREAD", **spread) == [("draft and verify", "STRICT_SPREAD", 3)]


@pytest.mark.parametrize(
    "placement",
    [
        {"draft": {"labels": {"stage": "draft"}}},
        {**APART, "draft": {"labels": {"stage": "!verify"}}},
        {**APART, "draft": {"labels": {"stage": "in(draft,verify)"}}},
        {**APART, "verify": {"labels": {"stage": "verify"}, "strategy": "STRICT_PACK"}},
    ],
)
def test_stages_that_may_meet_on_a_node_stay_two_groups(placement: dict[str, object]) -> None:
    assert len(_groups(stages="STRICT_SPREAD", **placement)) == 2


def _all_slots(**placement: object) -> Bundles:
    config = PlacementConfig.model_validate(placement)
    (group,) = groups_of(rank_slots(config, num_verify_ranks=2, gpus_per_rank=1.0), config)
    return group


def test_only_a_bundle_larger_than_every_node_and_every_node_type_is_impossible() -> None:
    head, large = _node("head", CPU=8.0), _node("node type large", CPU=8.0, GPU=8.0)
    small = _node("node type small", CPU=8.0, GPU=0.5)
    group = _all_slots()
    require_possible(group, [head], [])  # no node types are known: a node may still come
    require_possible(group, [head], [small, large])
    with pytest.raises(ConfigError, match=r"actor needs CPU 0\.5, GPU 1.* node type small"):
        require_possible(group, [head], [small])


def test_a_strict_pack_must_fit_one_node_type_as_a_whole() -> None:
    group = _all_slots(stages="STRICT_PACK")
    require_possible(group, [], [_node("node type large", CPU=8.0, GPU=3.0)])
    with pytest.raises(ConfigError, match="all 3 bundles together"):
        require_possible(group, [], [_node("node type small", CPU=8.0, GPU=2.0)])


def _require(nodes: list[Node], **placement: object) -> None:
    config = PlacementConfig.model_validate(placement)
    slots = rank_slots(config, num_verify_ranks=2, gpus_per_rank=0.0)
    require_room(groups_of(slots, config), relation_of(config), nodes)


def test_a_cluster_that_no_node_joins_has_room_or_says_what_it_lacks() -> None:
    _require([_node("a", free={"CPU": 0.0}, CPU=2.0)])
    _require([_node("a", CPU=1.0), _node("b", CPU=1.0)], stages="STRICT_SPREAD")
    with pytest.raises(ConfigError, match=r"verify rank 1 needs CPU 0\.5: node a is filled by"):
        _require([_node("a", CPU=1.0)])
    with pytest.raises(ConfigError, match="holds the other stage"):
        _require([_node("a", CPU=8.0)], stages="STRICT_SPREAD")
