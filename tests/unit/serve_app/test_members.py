"""What goes wrong with an actor is told in terms of ours, with its name."""

from ray.exceptions import ActorUnavailableError, RayActorError

from eesd_dist.errors import PROCESS_DIED, CheckpointError, ConfigError
from serve_app import _members


def test_a_damaged_checkpoint_is_told_with_the_rank_and_the_node_that_saw_it() -> None:
    error = CheckpointError(file="/m/model-00002.safetensors", found="a hole", expected="none")
    told = _members._ours(error, peer="verify rank 1 (pid 7 on 10.0.0.3)", operation="start")
    assert isinstance(told, ConfigError)
    assert str(told) == (
        "verify rank 1 (pid 7 on 10.0.0.3): /m/model-00002.safetensors: found a hole, expected none"
    )


def test_what_ray_says_of_a_death_tells_processes_from_nodes_and_links() -> None:
    of_node = RayActorError(error_msg="The actor died because its node has died. Node Id: 1")
    assert _members._why_gone(RayActorError()) == PROCESS_DIED
    assert _members._why_gone(of_node) == "its node has died"
    cut = ActorUnavailableError("RpcError", None)
    assert _members._why_gone(cut) == "its process has died, or the link to it"
