"""Placement groups for the workers of a pipeline: requested, awaited, repaired and removed.

One group, or one per stage where a single strategy is not enough; then the second is kept to or
from the nodes of the first by a label selector on node ids, since Ray has no relation between
groups. They wait for nodes as long as it takes, visible to an autoscaler. `rank_slots` decides
which bundles they have.

When a node dies Ray moves its bundles. A group that is kept to a dead node would wait for ever: it
is placed again without that restriction.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.ray_compat import (
    autoscaler_news,
    available_resources,
    is_actor_dead,
    reported_node_types,
)
from eesd_dist.errors import ConfigError, EngineError
from eesd_dist.workers.tenure import placement_groups_named
from serve_app.pipeline.placement.rank_slots import (
    Bundles,
    Node,
    RankSlot,
    could_hold,
    groups_of,
    related,
    relation_of,
    require_possible,
    why_unplaced,
)
from serve_app.placement_config import PlacementConfig, Strategy

logger = logging.getLogger(__name__)

_AT_ONCE_S = 1
"""Whole seconds: Ray waits for none where it is given half of one."""
_POLL_S = 0.5
_PREFERENCE_WAIT_S = 5.0
"""Time for which a preferred placement is waited for."""
_POLL_STATUS_S = 1.0
_TELL_S = 10.0
_TELL_WAITING_S = 2.0
_DEMAND_EVERY_S = 10.0
"""Pause before a second group that could be placed is requested again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placement:
    """Bundles, and Ray's placement group of them."""

    bundles: Bundles
    group: PlacementGroup


class PlacementGroups:
    """The placement groups of one pipeline, and the bundle of each of its rank slots."""

    def __init__(self, groups: Sequence[_Placement], *, name: str, owner: str) -> None:
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
        for placement in self._groups:
            if slot in placement.bundles.slots:
                return PlacementGroupSchedulingStrategy(
                    placement.group,
                    placement_group_bundle_index=placement.bundles.slots.index(slot),
                )
        raise ConfigError(f"{slot.name} has no bundle in the placement of {self._name}")

    def remove(self) -> None:
        """Removes the groups; actors in them end. May wait for Ray."""
        with self._lock:
            self._is_removed = True
            for placement in self._groups:
                remove_placement_group(placement.group)

    async def keep(self) -> None:
        """Repairs groups while bundles are being moved, and logs what is missing.

        Runs until it is cancelled.
        """
        last_log_s = -_TELL_S
        loop = asyncio.get_running_loop()
        while True:
            try:
                await asyncio.to_thread(self._poll)
            except Exception:  # Ray's errors while its head is away; tried again
                logger.exception("placement not checked: pipeline=%s", self._name)
            if self._missing and loop.time() - last_log_s > _TELL_S:
                last_log_s = loop.time()
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
        for at, placement in enumerate(self._groups):
            state = _table(placement.group)["state"]
            if state == "CREATED":
                continue
            if state == "REMOVED":  # by workers that had no supervisor while this one was frozen
                self._groups[at] = placement = self._request(placement.bundles)
            nodes = nodes_now()
            alive = {node.node_id for node in nodes}
            node_ids = placement.bundles.allowed_nodes
            if node_ids is not None and not node_ids <= alive:
                self._groups[at] = placement = self._place_again(placement)
            yield why_unplaced(placement.bundles, nodes)

    def _place_again(self, placement: _Placement) -> _Placement:
        logger.warning(
            "the %s stage was kept to a node that is gone, and is placed anywhere: pipeline=%s",
            placement.bundles.stages,
            self._name,
        )
        remove_placement_group(placement.group)
        return self._request(replace(placement.bundles, allowed_nodes=None))

    def _request(self, bundles: Bundles) -> _Placement:
        return _requested_group(bundles, name=self._name, owner=self._owner)


def present_placement_groups(
    slots: Sequence[RankSlot], *, placement: PlacementConfig, name: str, owner: str
) -> PlacementGroups:
    """Returns the groups that an earlier supervisor of the pipeline has placed, for all stages or
    one each, with their strategies. Raises EngineError when one of them is gone."""
    present = placement_groups_named(f"{name}/")
    placements: list[_Placement] = []
    for stages in ("draft and verify", "verify", "draft"):
        prefix = f"{name}/{stages}/"
        group = next((g for full, g in present.items() if full.startswith(prefix)), None)
        if group is None:
            continue
        bundles = Bundles(
            slots=tuple(slot for slot in slots if slot.stage in stages.split(" and ")),
            strategy=_table(group)["strategy"],
        )
        if placements and relation_of(placement) in ("PACK", "STRICT_PACK"):
            # It may have been kept to the nodes of the first group.
            nodes = _nodes_of(placements[0].group) | _nodes_of(group)
            bundles = replace(bundles, allowed_nodes=frozenset(nodes - {""}))
        placements.append(_Placement(bundles=bundles, group=group))
    stages_present = {slot.stage for entry in placements for slot in entry.bundles.slots}
    for stage in {slot.stage for slot in slots} - stages_present:
        raise EngineError(f"the placement group {name}/{stage}/ is gone")
    return PlacementGroups(placements, name=name, owner=owner)


def remove_abandoned_groups(app: str, *, present: Collection[str]) -> None:
    """Removes groups of which the supervisor died while it waited for room: no worker's lease ends
    them. `present`: pipelines with a worker or a supervisor."""
    for name, group in placement_groups_named(f"{app}/").items():
        pipeline, *_, last = name.removeprefix(f"{app}/").split("/")
        if pipeline not in present and is_actor_dead(last.split("-")[0]):
            logger.warning("abandoned placement group removed: name=%s", name)
            remove_placement_group(group)


async def placement_groups_for(
    slots: Sequence[RankSlot],
    *,
    placement: PlacementConfig,
    name: str,
    owner: str,
    on_wait: Callable[[str], None] = lambda why: None,
) -> PlacementGroups:
    """Places every slot, in groups that outlive the caller; waits as long as it takes.

    `name` is how their names in Ray begin, `owner` the actor id of the supervisor. `on_wait` is
    told now and then which bundle lacks what, and where. Raises ConfigError for a bundle that fits
    no node and no node type. A cancelled call leaves no group behind."""
    nodes, types, _ = await asyncio.to_thread(_cluster_now)
    groups = groups_of(slots, placement, (*nodes, *types))
    for group in groups:
        _log_choice(group, placement, name=name)
    placing = _Placer(relation_of(placement), name=name, owner=owner)
    telling = asyncio.ensure_future(placing.tell(groups, on_wait))
    work = asyncio.ensure_future(placing.all_of(groups))
    try:
        await asyncio.wait({telling, work}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await telling  # raises
        return PlacementGroups(await work, name=name, owner=owner)
    finally:
        for task in (telling, work):
            task.cancel()
        await asyncio.gather(telling, work, return_exceptions=True)
        placing.give_back_unless_complete()


def _log_choice(group: Bundles, placement: PlacementConfig, *, name: str) -> None:
    """Logs the strategy of several ranks' group that no setting has chosen, and why."""
    stage = placement.draft if group.stages == "draft" else placement.verify
    if stage.strategy is None and placement.strategy is None and len(group.slots) > 1:
        is_strict = group.strategy == "STRICT_PACK"
        logger.info(
            "placement: pipeline=%s stages=%s strategy=%s reason=%s",
            name,
            group.stages,
            group.strategy,
            f"a node is large enough for its {len(group.slots)} bundles; with placement."
            f"{group.stages}.strategy: PACK they may be on several"
            if is_strict
            else "no node is large enough for all: whole nodes first"
            if group.stages == "verify"
            else "placement.stages",
        )


class _Placer:
    """An attempt to place one group or two; all of them are removed if it fails."""

    def __init__(self, relation: Strategy, *, name: str, owner: str) -> None:
        self._relation = relation
        self._name = name
        self._owner = owner
        self._placements: list[_Placement] = []
        self._demand: _Placement | None = None
        """Requested so that an autoscaler sees it; never kept."""
        self._is_complete = False

    async def all_of(self, groups: Sequence[Bundles]) -> list[_Placement]:
        first, *others = groups
        await self._place(first, then=others)
        for second in others:
            if await self._blocks(first, second):
                # The first took the only nodes that the second could have: exchange them.
                self._drop_last()
                first, second = second, first
                await self._place(first, then=[second])
            await self._place_related(second)
        self._is_complete = True
        return self._placements

    async def tell(self, groups: Sequence[Bundles], on_wait: Callable[[str], None]) -> None:
        """Explains, until it is cancelled, what is waited for. Raises ConfigError for a bundle that
        can never be placed."""
        while True:
            await asyncio.sleep(_TELL_WAITING_S)
            try:
                nodes, types, autoscaler_lines = await asyncio.to_thread(_cluster_now)
            except RayError as error:  # its head is away
                logger.info("nodes not known: pipeline=%s error=%r", self._name, error)
                continue
            for group in groups:
                require_possible(group, nodes, types)
            on_wait(". ".join((*self._why(groups, nodes), *autoscaler_lines)))

    def _why(self, groups: Sequence[Bundles], nodes: Sequence[Node]) -> Iterator[str]:
        bundles = [placement.bundles for placement in self._placements]
        if bundles:
            yield why_unplaced(bundles[-1], nodes)
        for group in groups[len(bundles) :]:
            if not could_hold(group, nodes):
                yield why_unplaced(group, nodes)

    def give_back_unless_complete(self) -> None:
        self._drop_demand()
        while self._placements and not self._is_complete:
            self._drop_last()

    async def _blocks(self, first: Bundles, second: Bundles) -> bool:
        """Returns whether the first group takes all nodes that the second could have."""
        if self._relation != "STRICT_SPREAD":
            return False
        nodes = await asyncio.to_thread(nodes_now)
        restricted = self._related(second)
        return could_hold(second, nodes) and not could_hold(restricted, nodes)

    async def _place_related(self, second: Bundles) -> None:
        """Places the second group by its relation to the first; a preference may be dropped."""
        restricted = self._related(second)
        if self._relation == "STRICT_SPREAD":
            await self._place(restricted)
            return
        nodes = await asyncio.to_thread(nodes_now)
        try:
            async with asyncio.timeout(
                _PREFERENCE_WAIT_S if could_hold(restricted, nodes) else _POLL_S
            ):
                await self._place(restricted)
        except TimeoutError:
            logger.info("the stages cannot have %s: pipeline=%s", self._relation, self._name)
            self._drop_last()
            await self._place(second)

    def _related(self, second: Bundles) -> Bundles:
        (first,) = self._placements
        return related(second, self._relation, to_nodes=_nodes_of(first.group))

    async def _place(self, bundles: Bundles, *, then: Sequence[Bundles] = ()) -> None:
        """Waits until Ray has placed the group. `then`: the group that will be placed after it.

        An autoscaler should start nodes for both at the same time, so the second is requested too.
        It must not be held while the first has no room: two pipelines, each with the half that the
        other one waits for, would wait for ever. So it is given back as soon as it is placed, and
        requested again later.
        """
        self._placements.append(_requested_group(bundles, name=self._name, owner=self._owner))
        group = self._placements[-1].group
        next_s = 0.0
        # Only once: the GCS keeps every such call for ever.
        has_room = await asyncio.to_thread(group.wait, _AT_ONCE_S)
        while not has_room:
            time_s = time.monotonic()
            if then and self._demand is None and time_s >= next_s:
                self._demand = _requested_group(then[0], name=self._name, owner=self._owner)
            elif self._demand is not None and _is_placed(self._demand.group):
                self._drop_demand()
                next_s = time_s + _DEMAND_EVERY_S
            await asyncio.sleep(_POLL_S)
            has_room = await asyncio.to_thread(_is_placed, group)
        self._drop_demand()

    def _drop_demand(self) -> None:
        if self._demand is not None:
            remove_placement_group(self._demand.group)
            self._demand = None

    def _drop_last(self) -> None:
        remove_placement_group(self._placements.pop().group)


def _requested_group(bundles: Bundles, *, name: str, owner: str) -> _Placement:
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
    return _Placement(bundles=bundles, group=group)


def _prefix(name: str, bundles: Bundles) -> str:
    return f"{name}/{bundles.stages}/"


def _nodes_of(group: PlacementGroup) -> set[str]:
    return set(_table(group)["bundles_to_node_id"].values())


def _is_placed(group: PlacementGroup) -> bool:
    return bool(_table(group).get("state") == "CREATED")


def _table(group: PlacementGroup) -> dict[str, Any]:
    table: dict[str, Any] = placement_group_table(group)
    return table


def _cluster_now() -> tuple[tuple[Node, ...], tuple[Node, ...], tuple[str, ...]]:
    """Returns the nodes, the node types, and what the autoscaler is doing."""
    types = tuple(
        Node(
            node_id="",
            name=f"node type {node_type.name}",
            resources=node_type.resources,
            free=node_type.resources,
            labels={},
        )
        for node_type in reported_node_types()
    )
    return nodes_now(), types, tuple(f"Ray's autoscaler: {line}" for line in autoscaler_news())


def nodes_now() -> tuple[Node, ...]:
    """Returns the nodes that are alive, with what is free on them."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    free = available_resources()
    count = Counter(node["NodeName"] for node in alive)
    return tuple(
        Node(
            node_id=node["NodeID"],
            name=_unique_name(node["NodeName"], node["NodeID"], count[node["NodeName"]]),
            resources=node["Resources"],
            free=free.get(node["NodeID"], {}),
            labels=node["Labels"],
        )
        for node in alive
    )


def _unique_name(name: str, node_id: str, count: int) -> str:
    """Raylets of one host have the same name."""
    return name if count == 1 else f"{name} [{node_id[:8]}]"
