"""Placement groups for the workers of a pipeline: requested, awaited, repaired and removed.

One group, or one per stage where a single strategy is not enough; then the second is kept to or
from the nodes of the first by a label selector on node ids, since Ray has no relation between
groups. All are placed within the timeout, or none is left behind. `placement` decides which bundles
they have.

When a node dies Ray moves its bundles. A group that is kept to a dead node would wait for ever: it
is placed again without that restriction.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.ray_compat import available_resources, is_actor_dead
from eesd_dist.errors import ConfigError, EngineError
from eesd_dist.workers.tenure import placement_groups_named
from serve_app.config import PlacementConfig, Strategy
from serve_app.pipeline.placement.rank_slots import (
    Bundles,
    Node,
    RankSlot,
    could_hold,
    groups_of,
    related,
    relation_of,
    why_unplaced,
)

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_PREFERENCE_WAIT_S = 5.0
"""How long a preferred placement is waited for."""
_POLL_STATUS_S = 1.0
_TELL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """Bundles, and Ray's placement group of them."""

    bundles: Bundles
    group: PlacementGroup


class PlacementGroups:
    """The placement groups of one pipeline, and the bundle of each of its rank slots."""

    def __init__(self, groups: Sequence[_Placed], *, name: str, owner: str) -> None:
        self._groups = list(groups)
        self._name = name
        self._owner = owner
        self._missing: tuple[str, ...] = ()
        self._lock = threading.Lock()
        """A check may still run in its thread after `keep` was cancelled."""
        self._is_removed = False

    @property
    def missing(self) -> tuple[str, ...]:
        """Which bundles have no node now, and why; empty when every one has."""
        return self._missing

    def strategy_for(self, slot: RankSlot) -> PlacementGroupSchedulingStrategy:
        for placed in self._groups:
            if slot in placed.bundles.slots:
                return PlacementGroupSchedulingStrategy(
                    placed.group, placement_group_bundle_index=placed.bundles.slots.index(slot)
                )
        raise ConfigError(f"{slot.name} has no bundle in the placement of {self._name}")

    def remove(self) -> None:
        """Removes the groups; actors in them end. May wait for Ray."""
        with self._lock:
            self._is_removed = True
            for placed in self._groups:
                remove_placement_group(placed.group)

    async def keep(self) -> None:
        """Repairs groups while bundles are being moved, and logs what is missing.

        Runs until it is cancelled.
        """
        told_s = -_TELL_S
        loop = asyncio.get_running_loop()
        while True:
            try:
                await asyncio.to_thread(self._poll)
            except Exception:  # Ray's errors while its head is away; tried again
                logger.exception("placement not checked: pipeline=%s", self._name)
            if self._missing and loop.time() - told_s > _TELL_S:
                told_s = loop.time()
                logger.warning(
                    "waiting for placement: pipeline=%s %s", self._name, ". ".join(self._missing)
                )
            await asyncio.sleep(_POLL_STATUS_S)

    def _poll(self) -> None:
        with self._lock:
            if not self._is_removed:
                self._missing = tuple(self._repaired())

    def _repaired(self) -> Iterator[str]:
        """Asks again for groups that Ray cannot restore; yields what is missing."""
        for at, placed in enumerate(self._groups):
            state = _table(placed.group)["state"]
            if state == "CREATED":
                continue
            if state == "REMOVED":  # by workers that had no supervisor while this one was frozen
                self._groups[at] = placed = self._asked(placed.bundles)
            nodes = nodes_now()
            alive = {node.node_id for node in nodes}
            kept_to = placed.bundles.kept_to
            if kept_to is not None and not kept_to <= alive:
                self._groups[at] = placed = self._place_again(placed)
            yield why_unplaced(placed.bundles, nodes)

    def _place_again(self, placed: _Placed) -> _Placed:
        logger.warning(
            "the %s stage was kept to a node that is gone, and is placed anywhere: pipeline=%s",
            placed.bundles.stages,
            self._name,
        )
        remove_placement_group(placed.group)
        return self._asked(replace(placed.bundles, kept_to=None))

    def _asked(self, bundles: Bundles) -> _Placed:
        return _asked(bundles, name=self._name, owner=self._owner)


def present_placement_groups(
    slots: Sequence[RankSlot], *, placement: PlacementConfig, name: str, owner: str
) -> PlacementGroups:
    """Returns the groups that an earlier supervisor of the pipeline has placed. Raises EngineError
    when one of them is gone."""
    placed: list[_Placed] = []
    for bundles in groups_of(slots, placement):
        present = placement_groups_named(_prefix(name, bundles))
        if not present:
            raise EngineError(f"the placement group {_prefix(name, bundles)} is gone")
        group = next(iter(present.values()))
        if placed and relation_of(placement) in ("PACK", "STRICT_PACK"):
            # It may have been kept to the nodes of the first group.
            nodes = _nodes_of(placed[0].group) | _nodes_of(group)
            bundles = replace(bundles, kept_to=frozenset(nodes - {""}))
        placed.append(_Placed(bundles=bundles, group=group))
    return PlacementGroups(placed, name=name, owner=owner)


def remove_abandoned_groups(app: str, *, present: Collection[str]) -> None:
    """Removes groups of which the supervisor died while it waited for room: no worker's lease ends
    them. `present`: pipelines with a worker or a supervisor."""
    for name, group in placement_groups_named(f"{app}/").items():
        pipeline, *_, last = name.removeprefix(f"{app}/").split("/")
        if pipeline not in present and is_actor_dead(last.split("-")[0]):
            logger.warning("abandoned placement group removed: name=%s", name)
            remove_placement_group(group)


async def placement_groups_for(
    slots: Sequence[RankSlot], *, placement: PlacementConfig, name: str, owner: str
) -> PlacementGroups:
    """Places every slot, in groups that outlive the caller.

    `name` is how their names in Ray begin, `owner` the actor id of the supervisor. Raises
    ConfigError that says which bundle lacks what, and where."""
    groups = groups_of(slots, placement)
    placing = _Placing(placement, name=name, owner=owner)
    try:
        async with asyncio.timeout(placement.timeout_s):
            return PlacementGroups(await placing.all_of(groups), name=name, owner=owner)
    except TimeoutError as error:
        nodes = await asyncio.to_thread(nodes_now)
        raise ConfigError(
            f"no room for pipeline {name} within {placement.timeout_s:g} s: "
            f"{placing.why(nodes)}. Change placement in the configuration, or add nodes"
        ) from error
    finally:
        placing.give_back_unless_complete()


class _Placing:
    """One attempt to place one group or two; all of them are removed if it fails."""

    def __init__(self, placement: PlacementConfig, *, name: str, owner: str) -> None:
        self._relation: Strategy = relation_of(placement)
        self._name = name
        self._owner = owner
        self._asked: list[_Placed] = []
        self._is_complete = False

    async def all_of(self, groups: Sequence[Bundles]) -> list[_Placed]:
        first, *rest = groups
        await self._place(first)
        for second in rest:
            if await self._blocks(first, second):
                # The first took the only nodes that the second could have: exchange them.
                self._drop_last()
                first, second = second, first
                await self._place(first)
            await self._place_related(second)
        self._is_complete = True
        return self._asked

    def why(self, nodes: Sequence[Node]) -> str:
        """Explains the group that is being waited for."""
        return why_unplaced(self._asked[-1].bundles, nodes)

    def give_back_unless_complete(self) -> None:
        while self._asked and not self._is_complete:
            self._drop_last()

    async def _blocks(self, first: Bundles, second: Bundles) -> bool:
        """Returns whether the first group takes all nodes that the second could have."""
        if self._relation != "STRICT_SPREAD":
            return False
        nodes = await asyncio.to_thread(nodes_now)
        kept = self._related(second)
        return could_hold(second, nodes) and not could_hold(kept, nodes)

    async def _place_related(self, second: Bundles) -> None:
        """Places the second group by its relation to the first; a preference may be dropped."""
        kept = self._related(second)
        if self._relation == "STRICT_SPREAD":
            await self._place(kept)
            return
        nodes = await asyncio.to_thread(nodes_now)
        try:
            async with asyncio.timeout(_PREFERENCE_WAIT_S if could_hold(kept, nodes) else _POLL_S):
                await self._place(kept)
        except TimeoutError:
            logger.info("the stages cannot have %s: pipeline=%s", self._relation, self._name)
            self._drop_last()
            await self._place(second)

    def _related(self, second: Bundles) -> Bundles:
        (first,) = self._asked
        return related(second, self._relation, to_nodes=_nodes_of(first.group))

    async def _place(self, bundles: Bundles) -> None:
        self._asked.append(_asked(bundles, name=self._name, owner=self._owner))
        group = self._asked[-1].group
        while not await asyncio.to_thread(group.wait, _POLL_S):
            pass

    def _drop_last(self) -> None:
        remove_placement_group(self._asked.pop().group)


def _asked(bundles: Bundles, *, name: str, owner: str) -> _Placed:
    selectors = bundles.selectors()
    try:
        group = placement_group(
            [slot.resources for slot in bundles.slots],
            strategy=bundles.strategy,
            # A group that replaces another exists together with it for a moment.
            name=f"{_prefix(name, bundles)}{owner}-{uuid4().hex[:8]}",
            lifetime="detached",
            bundle_label_selector=selectors if any(selectors) else None,
        )
    except ValueError as error:  # a selector that Ray does not understand
        raise ConfigError(f"placement of the {bundles.stages} stage: {error}") from error
    return _Placed(bundles=bundles, group=group)


def _prefix(name: str, bundles: Bundles) -> str:
    return f"{name}/{bundles.stages}/"


def _nodes_of(group: PlacementGroup) -> set[str]:
    return set(_table(group)["bundles_to_node_id"].values())


def _table(group: PlacementGroup) -> dict[str, Any]:
    table: dict[str, Any] = placement_group_table(group)
    return table


def nodes_now() -> tuple[Node, ...]:
    """Returns the nodes that are alive, with what is free on them."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    free = available_resources()
    count = Counter(node["NodeName"] for node in alive)
    return tuple(
        Node(
            node_id=node["NodeID"],
            name=_told_apart(node["NodeName"], node["NodeID"], count[node["NodeName"]]),
            resources=node["Resources"],
            free=free.get(node["NodeID"], {}),
            labels=node["Labels"],
        )
        for node in alive
    )


def _told_apart(name: str, node_id: str, count: int) -> str:
    """Raylets of one host have the same name."""
    return name if count == 1 else f"{name} [{node_id[:8]}]"
