"""Where the bundles of a pipeline end up in a Ray of four nodes; the nodes are on this machine."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

_SECONDS = 200


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What `tests.support.raylets` has seen. D drafts, V and W verify, by their labels."""
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.raylets"],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
        env=environment,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    seen: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return seen


def test_labels_choose_the_nodes_of_each_stage(report: dict[str, Any]) -> None:
    drafting, *ranks = report["labels"]
    assert drafting == "D"
    assert set(ranks) <= {"V", "W"}


def test_ranks_that_must_stand_apart_do(report: dict[str, Any]) -> None:
    assert sorted(report["verify_apart"]) == ["D", "V", "W"]


def test_stages_that_must_stand_apart_share_no_node(report: dict[str, Any]) -> None:
    drafting, *ranks = report["stages_apart"]
    assert drafting not in ranks


def test_the_stage_that_can_choose_makes_room_for_the_one_that_cannot(
    report: dict[str, Any],
) -> None:
    for drafting, *ranks in report["swapped"]:
        assert drafting == "D"
        assert set(ranks) <= {"V", "W"}


def test_one_node_for_all_is_one_node(report: dict[str, Any]) -> None:
    assert len(set(report["one_node"])) == 1


def test_a_stage_that_prefers_the_nodes_of_the_other_gets_them_where_it_can(
    report: dict[str, Any],
) -> None:
    drafting, *ranks = report["beside"]
    assert len(set(ranks)) == 2
    assert drafting in ranks
    assert report["wish_denied"][0] == "D"


def test_the_ranks_of_a_tensor_parallel_group_share_a_node_that_is_large_enough(
    report: dict[str, Any],
) -> None:
    for name in ("tp8", "tp4"):
        assert len(set(report["gpus"][name][1:])) == 1, report["gpus"]
    drafting, *ranks = report["gpus"]["tp8"]
    assert drafting not in ranks, "the other node has room for it"
    assert len(set(report["gpus"]["tp4"])) == 1, "the drafting actor is on their node where it fits"


def test_a_group_larger_than_every_node_fills_whole_nodes(report: dict[str, Any]) -> None:
    ranks = report["gpus"]["tp12"][1:]
    assert sorted(ranks.count(node) for node in set(ranks)) == [4, 8]


def test_a_setting_wins_over_the_choice(report: dict[str, Any]) -> None:
    ranks = report["gpus"]["tp8_pack"][1:]
    assert len(set(ranks)) == 2, "what Ray's PACK does with nine bundles"


def test_what_has_no_node_waits_says_why_and_leaves_nothing_behind_when_it_is_given_up(
    report: dict[str, Any],
) -> None:
    # That nothing is held any more was waited for there.
    assert "label eesd.io/stage=none" in report["no_label"]["said"]
    assert "holds the other stage" in report["second_waits"]["said"]


def test_waiting_for_a_node_costs_little_processor_time(report: dict[str, Any]) -> None:
    """A call of Ray that returns at once would take a processor, and memory of the GCS."""
    for case in ("no_label", "second_waits", "both_wait"):
        assert report[case]["processor_s"] < 0.5, "in six seconds"


def test_an_autoscaler_sees_the_demand_of_both_stages_at_once(report: dict[str, Any]) -> None:
    assert report["both_wait"]["num_visible"] == 3
    assert "drafting actor needs CPU 0.5, none 1" in report["both_wait"]["said"]
    assert "verify rank 1 need CPU 0.5, none 1" in report["both_wait"]["said"]


def test_what_fits_no_reported_node_type_is_refused(report: dict[str, Any]) -> None:
    assert "verify rank 0 needs CPU 5" in report["impossible"]
    assert "node type small" in report["impossible"]


def test_bundles_of_a_dead_node_are_placed_on_another_and_actors_start_there(
    report: dict[str, Any],
) -> None:
    death = report["death"]
    assert len(set(death["before"])) == 1
    assert death["before"][0] not in death["after"]
    assert set(death["after"][1:]) <= {"V", "W"}
