"""Which bundle lacks what, said so that a person can act on it."""

from serve_app._placement import Post, gpus_per_rank, posts_of, why_unplaced
from serve_app.config import PlacementConfig, service_config


def _posts(**resources: float) -> tuple[Post, ...]:
    placement = PlacementConfig.model_validate(
        {"draft": {"num_cpus": 1}, "verify": {"num_cpus": 2, "resources": resources}}
    )
    return posts_of(placement, num_verify_ranks=2, gpus_per_rank=0.0)


def test_the_drafting_actor_comes_first_and_ranks_follow_in_order() -> None:
    posts = _posts()
    assert [post.name for post in posts] == ["drafting actor", "verify rank 0", "verify rank 1"]
    assert [post.resources for post in posts] == [{"CPU": 1}, {"CPU": 2}, {"CPU": 2}]


def test_a_resource_that_no_node_has_is_named() -> None:
    said = why_unplaced(_posts(tpu=1), strategy="PACK", nodes={"a": {"CPU": 8}}, free={"CPU": 8})
    assert said == "verify rank 0 needs CPU 2, tpu 1: no node has tpu 1, the most on any of 1 is 0"


def test_what_each_node_has_only_half_of_is_told_apart() -> None:
    nodes = {"a": {"CPU": 8}, "b": {"CPU": 1, "tpu": 1}}
    said = why_unplaced(_posts(tpu=1), strategy="PACK", nodes=nodes, free={})
    assert said.endswith("none of 2 nodes has all of it")


def test_a_strict_pack_that_is_too_large_for_one_node() -> None:
    nodes = {"a": {"CPU": 4}, "b": {"CPU": 4}}
    said = why_unplaced(_posts(), strategy="STRICT_PACK", nodes=nodes, free={"CPU": 8})
    assert said == "all 3 bundles together need CPU 5, and no one node has that"


def test_a_strict_spread_over_too_few_nodes() -> None:
    said = why_unplaced(_posts(), strategy="STRICT_SPREAD", nodes={"a": {"CPU": 9}}, free={})
    assert said == "3 bundles want a node each, and there are 1"


def test_a_cluster_that_is_busy_is_not_called_too_small() -> None:
    said = why_unplaced(_posts(), strategy="PACK", nodes={"a": {"CPU": 9}}, free={"CPU": 3})
    assert said == "all 3 bundles need CPU 5, and of it only 3 is free in the cluster"


def test_ranks_get_a_gpu_each_and_share_one_only_where_there_is_one() -> None:
    def share(num_gpus: float, ranks: int, *, must: bool = False) -> float:
        return gpus_per_rank(num_gpus=num_gpus, num_verify_ranks=ranks, must_have_one=must)

    assert share(0, 1) == 0.0
    assert share(0, 1, must=True) == 1.0  # an autoscaler may bring one
    assert share(1, 1) == 0.5
    assert share(1, 2) == 1.0
    assert share(8, 4) == 1.0


def test_what_the_operator_says_of_gpus_wins() -> None:
    placement = service_config(
        {"engine": {"model": {"path": "/m"}}, "placement": {"verify": {"num_gpus": 0.25}}}
    ).placement
    draft, rank = posts_of(placement, num_verify_ranks=1, gpus_per_rank=1.0)
    assert (draft.resources["GPU"], rank.resources["GPU"]) == (1.0, 0.25)
