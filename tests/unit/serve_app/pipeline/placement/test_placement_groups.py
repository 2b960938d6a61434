"""Placement groups that are repaired, or left behind; Ray is a table of states."""

from typing import Any

import pytest

from eesd_dist.errors import EngineError
from serve_app.pipeline.placement import placement_groups as module
from serve_app.pipeline.placement.placement_groups import (
    PlacementGroups,
    present_placement_groups,
    remove_abandoned_groups,
)
from serve_app.pipeline.placement.rank_slots import Node, rank_slots
from serve_app.placement_config import PlacementConfig

TWO_GROUPS = PlacementConfig.model_validate({"verify": {"strategy": "STRICT_PACK"}})
SLOTS = rank_slots(TWO_GROUPS, num_verify_ranks=2, gpus_per_rank=0.0)


class Ray:
    """Placement groups by name, each with its state and the nodes of its bundles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.states = dict.fromkeys(names, "CREATED")
        self.nodes = dict.fromkeys(names, "a")
        self.alive = {"a", "b"}
        self.asked: list[dict[str, Any]] = []
        self.dead: set[str] = set()
        for name, replacement in {
            "placement_group": self._placed,
            "placement_groups_named": self._named,
            "remove_placement_group": self.states.pop,
            "is_actor_dead": self.dead.__contains__,
            "nodes_now": self._nodes_now,
            "_table": self._table,
        }.items():
            monkeypatch.setattr(module, name, replacement)

    def _named(self, prefix: str) -> dict[str, str]:
        return {name: name for name in self.states if name.startswith(prefix)}

    def _placed(self, bundles: object, *, name: str, **options: Any) -> str:
        self.asked.append(options)
        self.states[name] = "PENDING"
        return name

    def _table(self, name: str) -> dict[str, Any]:
        return {
            "state": self.states[name],
            "strategy": "STRICT_PACK" if "/verify/" in name else "PACK",
            "bundles_to_node_id": {0: self.nodes.get(name, "")},
        }

    def _nodes_now(self) -> tuple[Node, ...]:
        return tuple(
            Node(node_id=node_id, name=node_id, resources={}, free={}, labels={})
            for node_id in self.alive
        )


def _claimed(ray: Ray) -> PlacementGroups:
    return present_placement_groups(SLOTS, placement=TWO_GROUPS, name="app/p", owner="two")


def test_a_claimed_group_that_was_kept_to_a_node_that_dies_is_placed_anywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = Ray(monkeypatch, "app/p/draft/one-1", "app/p/verify/one-2")
    groups = _claimed(ray)
    groups._poll()
    assert ray.asked == []
    assert groups.missing == ()
    ray.alive = {"b"}
    ray.states["app/p/draft/one-1"] = "RESCHEDULING"
    groups._poll()
    assert [request["bundle_label_selector"] for request in ray.asked] == [None]
    assert "app/p/draft/one-1" not in ray.states
    (name,) = [name for name in ray.states if name.startswith("app/p/draft/")]
    assert name.startswith("app/p/draft/two-"), "it belongs to this supervisor"
    assert groups.missing


def test_the_groups_that_ray_has_are_claimed_not_those_that_the_nodes_of_today_suggest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = Ray(monkeypatch, "app/p/draft and verify/one-1")
    groups = _claimed(ray)
    assert {groups.strategy_for(slot).placement_group for slot in SLOTS} == {*ray.states}
    ray.states = {"app/p/verify/one-2": "CREATED"}
    with pytest.raises(EngineError, match="app/p/draft/ is gone"):
        _claimed(ray)


def test_a_claimed_group_that_waits_for_its_node_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = Ray(monkeypatch, "app/p/draft/one-1", "app/p/verify/one-2")
    groups = _claimed(ray)
    ray.states["app/p/draft/one-1"] = "RESCHEDULING"
    groups._poll()
    assert ray.asked == []


def test_a_look_that_is_late_asks_for_nothing_once_the_groups_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = Ray(monkeypatch, "app/p/draft/one-1", "app/p/verify/one-2")
    groups = _claimed(ray)
    groups.remove()
    ray.states = dict.fromkeys(("app/p/draft/one-1", "app/p/verify/one-2"), "REMOVED")
    groups._poll()
    assert ray.asked == []


def test_groups_of_supervisors_that_died_while_they_waited_for_room_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("app/p/v/dead-1", "app/q/v/dead-2", "app/r/v/live-3", "other/s/v/dead-4")
    ray = Ray(monkeypatch, *names)
    ray.dead.add("dead")
    remove_abandoned_groups("app", present={"q"})
    assert set(ray.states) == set(names[1:]), "q has workers, of r the supervisor lives"
