"""Requests of a pipeline to the cluster, and the reasons why the cluster cannot provide them.

It decides whether bundles go into one placement group or two, which nodes the second is kept to or
from, and how to explain bundles without a node. Pure: it is given the nodes and does not call Ray.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from eesd_dist.errors import ConfigError
from eesd_dist.workers.messages import PlacementMode, StageName
from serve_app.placement_config import BundleConfig, PlacementConfig, Strategy

Resources = Mapping[str, float]

LEADER = "drafting actor"
"""Name of draft rank 0's slot."""

NODE_ID_LABEL = "ray.io/node-id"
"""Label that Ray gives to every node."""

_RAY_PARTS = 10_000
"""Ray counts a resource in parts of one ten-thousandth: 0.9 and 0.1 of a GPU are a whole one."""
_SHOWN_NODES = 4
_SHOWN_BUNDLES = 4
_SET = re.compile(r"(!?)in\((.*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlot:
    """A position in a pipeline that a worker fills."""

    name: str
    rank: int | None
    """Rank in its stage's group; None for the drafting actor, which leads the draft stage."""
    resources: dict[str, float]
    stage: StageName = "verify"
    labels: dict[str, str] = field(default_factory=dict)
    """Label selectors its node must satisfy."""
    is_spare: bool = False
    """True if its worker waits to take the slot of another one."""
    mode: PlacementMode = "dedicated"
    """Mode of its pipeline. In `shared` the drafting actor is verify rank 0 too."""

    def may_take(self, slot: "RankSlot") -> bool:
        """Returns whether a spare in this slot can take the other one."""
        return self.stage == slot.stage and (self.rank is None) == (slot.rank is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster, as Ray sees it now."""

    node_id: str
    name: str
    resources: Resources
    free: Resources
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundles:
    """A placement group: its slots, and their strategy."""

    slots: tuple[RankSlot, ...]
    strategy: Strategy
    allowed_nodes: frozenset[str] | None = None
    """Ids of the nodes on which it may be; None: any."""
    apart_from: frozenset[str] = frozenset()
    """Ids of the nodes it is kept from."""

    @property
    def stages(self) -> str:
        return " and ".join(dict.fromkeys(slot.stage for slot in self.slots))

    def selectors(self) -> list[dict[str, str]]:
        """Ray's label selectors, one for each bundle."""
        node_selector: dict[str, str] = {}
        if self.allowed_nodes is not None:
            node_selector[NODE_ID_LABEL] = f"in({','.join(sorted(self.allowed_nodes))})"
        elif self.apart_from:
            node_selector[NODE_ID_LABEL] = f"!in({','.join(sorted(self.apart_from))})"
        return [{**slot.labels, **node_selector} for slot in self.slots]

    def admits(self, node: Node, slot: RankSlot) -> bool:
        """Returns whether the node may hold the slot, resources aside."""
        if self.allowed_nodes is not None and node.node_id not in self.allowed_nodes:
            return False
        return node.node_id not in self.apart_from and not _labels_missed(slot, node)


def rank_slots(
    placement: PlacementConfig,
    *,
    num_verify_ranks: int,
    gpus_per_rank: float,
    mode: PlacementMode = "dedicated",
    num_draft_ranks: int = 1,
    num_draft_spares: int = 0,
    num_verify_spares: int = 0,
) -> tuple[RankSlot, ...]:
    """Returns the drafting actor first, then the other draft ranks, the verify ranks and spares.

    A shared drafting actor is verify rank 0 too, which has no slot then; without another verify
    rank there are no spares for them.
    """
    draft = _slot(LEADER, "draft", placement.draft, gpus_per_rank, mode)
    verify = _slot("verify rank 0", "verify", placement.verify, gpus_per_rank, mode)
    verify_ranks = range(1 if mode == "shared" else 0, num_verify_ranks)
    if not verify_ranks:
        num_verify_spares = 0
    return (
        draft,
        *[replace(draft, name=f"draft rank {r}", rank=r) for r in range(1, num_draft_ranks)],
        *[replace(verify, name=f"verify rank {r}", rank=r) for r in verify_ranks],
        *[replace(draft, name=f"draft spare {i}", is_spare=True) for i in range(num_draft_spares)],
        *[
            replace(verify, name=f"verify spare {i}", rank=0, is_spare=True)
            for i in range(num_verify_spares)
        ],
    )


def _slot(
    name: str, stage: StageName, bundle: BundleConfig, gpus_per_rank: float, mode: PlacementMode
) -> RankSlot:
    return RankSlot(
        name=name,
        rank=None if stage == "draft" else 0,
        stage=stage,
        resources=_resources(bundle, gpus_per_rank),
        labels=bundle.labels,
        mode=mode,
    )


def _resources(bundle: BundleConfig, gpus_per_rank: float) -> dict[str, float]:
    num_gpus = gpus_per_rank if bundle.num_gpus is None else bundle.num_gpus
    amounts = {"CPU": bundle.num_cpus, "GPU": num_gpus, **bundle.resources}
    return {name: amount for name, amount in amounts.items() if amount > 0}


def groups_of(
    slots: Sequence[RankSlot], placement: PlacementConfig, kinds: Sequence[Node] = ()
) -> tuple[Bundles, ...]:
    """Returns one group if one strategy is enough; else one per stage, the verify stage first.

    `kinds`: nodes and node types. Without a setting, the ranks of a stage are kept on one node if
    one of `kinds` is large enough for them, since each layer waits for all of them; else they fill
    whole nodes. Raises ConfigError for strategies that contradict each other.
    """
    if placement.strategy is not None:
        return (Bundles(slots=tuple(slots), strategy=placement.strategy),)
    if slots[0].mode == "shared":
        # The drafting actor is a rank of both stages.
        return (_group(slots, placement.verify.strategy or placement.stages, kinds),)
    relation = relation_of(placement)
    draft = _stage(slots, "draft", placement.draft.strategy, kinds)
    verify = _stage(slots, "verify", placement.verify.strategy, kinds)
    # A rank that is alone in its stage satisfies any strategy.
    multi_rank = [group for group in (draft, verify) if len(group.slots) > 1]
    if relation == "STRICT_PACK":
        for group in multi_rank:
            if group.strategy == "STRICT_SPREAD":
                raise ConfigError(
                    "placement.stages is STRICT_PACK, all on one node, and placement."
                    f"{group.stages}.strategy is STRICT_SPREAD, a node each: change one of them"
                )
        return (Bundles(slots=tuple(slots), strategy="STRICT_PACK"),)
    is_split = kinds and placement.verify.strategy is None and _num_ranks(verify) > 1
    if not is_split and all(group.strategy == relation for group in multi_rank):
        return (Bundles(slots=tuple(slots), strategy=relation),)
    if relation in ("SPREAD", "STRICT_SPREAD") and _have_other_nodes(placement):
        # One group is placed as a whole, and an autoscaler sees all of it at once.
        strategies = {group.strategy for group in multi_rank} or {verify.strategy}
        if len(strategies) == 1 and "STRICT_PACK" not in strategies:
            return (Bundles(slots=tuple(slots), strategy=strategies.pop()),)
    return verify, draft


def _stage(
    slots: Sequence[RankSlot], stage: StageName, setting: Strategy | None, kinds: Sequence[Node]
) -> Bundles:
    return _group(tuple(p for p in slots if p.stage == stage), setting, kinds)


def _group(slots: Sequence[RankSlot], setting: Strategy | None, kinds: Sequence[Node]) -> Bundles:
    group = Bundles(slots=tuple(slots), strategy=setting or "PACK")
    if setting is None and _num_ranks(group) > 1 and _fits_one(group, kinds):
        return replace(group, strategy="STRICT_PACK")
    return group


def _num_ranks(group: Bundles) -> int:
    return sum(not slot.is_spare for slot in group.slots)


def _fits_one(group: Bundles, kinds: Sequence[Node]) -> bool:
    """Returns whether a node, or a node type by its resources alone, could hold the whole
    group."""
    (whole,) = _merged_bundles(group).slots
    return any(
        _fits(whole.resources, kind.resources)
        and (not kind.node_id or not _labels_missed(whole, kind))
        for kind in kinds
    )


def _have_other_nodes(placement: PlacementConfig) -> bool:
    """Returns whether no node can have the labels of both stages, which keeps the stages apart."""
    draft, verify = placement.draft.labels, placement.verify.labels
    return any(
        draft[name] != verify[name]
        and not any(labels[name].startswith(("!", "in(")) for labels in (draft, verify))
        for name in draft.keys() & verify.keys()
    )


def relation_of(placement: PlacementConfig) -> Strategy:
    """Returns the strategy of the stages relative to each other."""
    return placement.stages or "PACK"


def related(group: Bundles, relation: Strategy, *, to_nodes: Collection[str]) -> Bundles:
    """Returns the second group, kept to or from the nodes of the first one."""
    node_ids = frozenset(to_nodes)
    if relation in ("SPREAD", "STRICT_SPREAD"):
        return replace(group, apart_from=node_ids)
    return replace(group, allowed_nodes=node_ids)


def could_hold(group: Bundles, nodes: Sequence[Node]) -> bool:
    """Returns whether these nodes are large enough when nothing else runs on them."""
    empty = [replace(node, free=node.resources) for node in nodes]
    return not _left_over(group, empty).unplaced


def require_possible(group: Bundles, nodes: Sequence[Node], types: Sequence[Node]) -> None:
    """Raises ConfigError for a bundle that is larger than every node and every node type.

    `types`: what an autoscaler can start, by resources; labels of its nodes are not known. Without
    any, nodes may come that are not known either.
    """
    if not types:
        return
    whole = _merged_bundles(group) if group.strategy == "STRICT_PACK" else group
    kinds = (*types, *nodes)
    for slot in whole.slots:
        if not any(_fits(slot.resources, kind.resources) for kind in kinds):
            names = _some([kind.name for kind in kinds], shown=_SHOWN_NODES, noun="kinds of nodes")
            raise ConfigError(
                f"{slot.name} needs {_needs(slot)}, and none is as large of {names}: change "
                "placement in the configuration, or the node types of the cluster"
            )


def require_room(groups: Sequence[Bundles], relation: Strategy, nodes: Sequence[Node]) -> None:
    """Raises ConfigError for groups that these nodes, when nothing else runs on them, cannot
    hold."""
    empty = [replace(node, free=node.resources) for node in nodes]
    first, *others = groups
    fits = {group.stages: _left_over(group, empty) for group in groups}
    first_nodes = fits[first.stages].held.keys()
    strict = [related(group, relation, to_nodes=first_nodes) for group in others]
    for group in (first, *(strict if relation == "STRICT_SPREAD" else others)):
        if _left_over(group, empty).unplaced:
            raise ConfigError(
                f"no room for a pipeline: {why_unplaced(group, empty)}. Change placement "
                "(placement.mode: shared takes a GPU less) or parallel in the configuration"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """Number of bundles of a group that fit, tried one after the other."""

    unplaced: tuple[RankSlot, ...]
    held: Mapping[str, tuple[RankSlot, ...]]
    """Slots put on each node, by node id."""


def why_unplaced(group: Bundles, nodes: Sequence[Node]) -> str:
    """Explains to operators which bundle lacks what on which node, and which slots use it."""
    if not nodes:
        return "the cluster has no node that is alive"
    if group.strategy == "STRICT_PACK":
        whole = _merged_bundles(group)
        if _left_over(whole, nodes).unplaced:
            return _explained(whole, whole.slots, nodes, held={})
    fit = _left_over(group, nodes)
    if not fit.unplaced:
        return (
            f"each bundle of the {group.stages} stage fits some node, but Ray did not place all "
            f"of them by the strategy {group.strategy}"
        )
    return _explained(group, fit.unplaced, nodes, held=fit.held)


def _merged_bundles(group: Bundles) -> Bundles:
    """Returns all bundles as one, which STRICT_PACK requires of a node."""
    labels = {name: value for slot in group.slots for name, value in slot.labels.items()}
    slot = RankSlot(
        name=f"all {len(group.slots)} bundles together (strategy STRICT_PACK)",
        rank=None,
        resources=summed([p.resources for p in group.slots]),
        labels=labels,
    )
    return replace(group, slots=(slot,), strategy="PACK")


def _left_over(group: Bundles, nodes: Sequence[Node]) -> _Fit:
    """First fit, the most demanding slots first: exact for equal bundles."""
    free = {node.node_id: dict(node.free) for node in nodes}
    held: dict[str, tuple[RankSlot, ...]] = {}
    unplaced = []
    choice = {
        slot.name: [node for node in nodes if group.admits(node, slot)] for slot in group.slots
    }
    for slot in sorted(
        group.slots, key=lambda p: (len(choice[p.name]), -sum(p.resources.values()))
    ):
        for node in choice[slot.name]:
            if group.strategy == "STRICT_SPREAD" and node.node_id in held:
                continue
            if group.strategy == "STRICT_PACK" and held and node.node_id not in held:
                continue
            if not _fits(slot.resources, free[node.node_id]):
                continue
            for name, amount in slot.resources.items():
                free[node.node_id][name] -= amount
            held[node.node_id] = (*held.get(node.node_id, ()), slot)
            break
        else:
            unplaced.append(slot)
    return _Fit(unplaced=tuple(unplaced), held=held)


def _explained(
    group: Bundles,
    unplaced: Sequence[RankSlot],
    nodes: Sequence[Node],
    *,
    held: Mapping[str, tuple[RankSlot, ...]],
) -> str:
    """Bundles that lack the same are explained together."""
    same: dict[str, list[str]] = {}
    for slot in unplaced:
        lacks = [
            f"node {node.name} {_what_lacks(group, slot, node, held.get(node.node_id, ()))}"
            for node in nodes
        ]
        summary = _some(lacks, shown=_SHOWN_NODES, noun="nodes")
        same.setdefault(f"{_needs(slot)}: {summary}", []).append(slot.name)
    sentences = [
        f"{_some(names, shown=_SHOWN_BUNDLES, noun='bundles', between=', ')} "
        f"{'needs' if len(names) == 1 else 'need'} {lack}"
        for lack, names in same.items()
    ]
    return ". ".join(sentences)


def _what_lacks(group: Bundles, slot: RankSlot, node: Node, held: Sequence[RankSlot]) -> str:
    if group.allowed_nodes is not None and node.node_id not in group.allowed_nodes:
        return "is not one of the nodes of the other stage"
    if node.node_id in group.apart_from:
        return "holds the other stage (placement.stages keeps the two apart)"
    missed = _labels_missed(slot, node)
    if missed:
        return f"has no label {missed[0]}"
    small = _too_small(slot.resources, node.resources)
    if small:
        return " and ".join(f"has {name} {_has(node.resources, name):g}" for name in small)
    in_use = _too_small(slot.resources, node.free)
    if in_use:
        return " and ".join(
            f"has {name} {node.resources[name] - _has(node.free, name):g} of "
            f"{node.resources[name]:g} in use"
            for name in in_use
        )
    names = ", ".join(p.name for p in held)
    if group.strategy == "STRICT_SPREAD" and held:
        return f"is for {names} (strategy STRICT_SPREAD: a node each)"
    if held:
        return f"is filled by {names}"
    return "has room, but not together with the others (strategy STRICT_PACK: all on one node)"


def _labels_missed(slot: RankSlot, node: Node) -> list[str]:
    return [
        f"{name}={selector}"
        for name, selector in slot.labels.items()
        if not matches(selector, node.labels.get(name))
    ]


def matches(selector: str, value: str | None) -> bool:
    """Implements Ray's label operators `x`, `!x`, `in(x,y)`, `!in(x,y)`; no label matches no x."""
    label_set = _SET.fullmatch(selector)
    if label_set is not None:
        return (value in label_set[2].split(",")) != bool(label_set[1])
    if selector.startswith("!"):
        return value != selector[1:]
    return value == selector


def _needs(slot: RankSlot) -> str:
    labels = [f"label {name}={value}" for name, value in slot.labels.items()]
    return ", ".join([f"{name} {amount:g}" for name, amount in slot.resources.items()] + labels)


def _some(texts: Sequence[str], *, shown: int, noun: str, between: str = "; ") -> str:
    more = len(texts) - shown
    listing = between.join(texts[:shown])
    return f"{listing}{between}and {more} {noun} more" if more > 0 else listing


def _has(resources: Resources, name: str) -> float:
    return resources.get(name, 0.0)


def _fits(demand: Resources, free: Resources) -> bool:
    return not _too_small(demand, free)


def _too_small(demand: Resources, free: Resources) -> list[str]:
    """Returns the names of the resources of which there is too little."""
    return [
        name
        for name, amount in demand.items()
        if round((amount - _has(free, name)) * _RAY_PARTS) > 0
    ]


def summed(resources: Sequence[Resources]) -> dict[str, float]:
    """Returns the total of each resource."""
    names = {name: None for amounts in resources for name in amounts}
    return {name: sum(amounts.get(name, 0.0) for amounts in resources) for name in names}
