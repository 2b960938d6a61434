"""What a pipeline asks of the cluster, and why the cluster cannot give it.

Pure: it is handed the nodes' resources and asks Ray nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve_app.config import BundleConfig, PlacementConfig

Resources = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A place in a pipeline that an actor fills."""

    name: str
    rank: int | None
    """Rank in the verify group; None for the drafting actor."""
    resources: dict[str, float]


def posts_of(
    placement: PlacementConfig, *, num_verify_ranks: int, gpus_per_rank: float
) -> tuple[Post, ...]:
    """The drafting actor first, then the verify ranks in order."""
    draft = Post(
        name="drafting actor", rank=None, resources=_resources(placement.draft, gpus_per_rank)
    )
    ranks = (
        Post(
            name=f"verify rank {rank}",
            rank=rank,
            resources=_resources(placement.verify, gpus_per_rank),
        )
        for rank in range(num_verify_ranks)
    )
    return (draft, *ranks)


def gpus_per_rank(*, num_gpus: float, num_verify_ranks: int, must_have_one: bool) -> float:
    """One each; on a machine with a single GPU the two stages of the smallest pipeline share it."""
    if num_gpus == 0:
        return 1.0 if must_have_one else 0.0
    return 0.5 if num_gpus == 1 and num_verify_ranks == 1 else 1.0


def _resources(bundle: BundleConfig, gpus_per_rank: float) -> dict[str, float]:
    num_gpus = gpus_per_rank if bundle.num_gpus is None else bundle.num_gpus
    wanted = {"CPU": bundle.num_cpus, "GPU": num_gpus, **bundle.resources}
    return {name: amount for name, amount in wanted.items() if amount > 0}


def why_unplaced(
    posts: Sequence[Post], *, strategy: str, nodes: Mapping[str, Resources], free: Resources
) -> str:
    """One sentence a person can act on: which bundle lacks what, and where."""
    for post in posts:
        lacking = _lacking_everywhere(post.resources, nodes)
        if lacking:
            return f"{post.name} needs {_listed(post.resources)}: {lacking}"
    total = _summed([post.resources for post in posts])
    if strategy == "STRICT_PACK" and not any(_fits(total, node) for node in nodes.values()):
        return f"all {len(posts)} bundles together need {_listed(total)}, and no one node has that"
    if strategy == "STRICT_SPREAD" and len(nodes) < len(posts):
        return f"{len(posts)} bundles want a node each, and there are {len(nodes)}"
    for name, amount in total.items():
        if free.get(name, 0.0) < amount:
            return (
                f"all {len(posts)} bundles need {name} {amount:g}, and of it only "
                f"{free.get(name, 0.0):g} is free in the cluster"
            )
    return f"each bundle fits some node, but not all of them by the strategy {strategy}"


def _lacking_everywhere(wanted: Resources, nodes: Mapping[str, Resources]) -> str:
    if any(_fits(wanted, node) for node in nodes.values()):
        return ""
    for name, amount in wanted.items():
        largest = max((node.get(name, 0.0) for node in nodes.values()), default=0.0)
        if largest < amount:
            return f"no node has {name} {amount:g}, the most on any of {len(nodes)} is {largest:g}"
    return f"none of {len(nodes)} nodes has all of it"


def _fits(wanted: Resources, node: Resources) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in wanted.items())


def _summed(parts: Sequence[Resources]) -> dict[str, float]:
    names = {name: None for part in parts for name in part}
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def _listed(resources: Resources) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())
