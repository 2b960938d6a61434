import socket
import threading
from collections.abc import Iterator

import pytest

from cluster.ports import ClusterPorts
from cluster.preflight.port_checks import (
    OpenedPorts,
    check_free,
    check_listed,
    check_reachable,
    ports_to_be_free,
    targets_of,
)
from cluster.preflight.port_probe import Listeners, PortUse, Target, Unreachable, connect_all
from tests.support.cluster_facts import cluster_node

OPENED = OpenedPorts(ephemeral=40_000, worker=20_999, in_use=())
HEAD = {"node:__internal_head__": 1.0}


@pytest.fixture
def listeners() -> Iterator[Listeners]:
    opened = Listeners()
    yield opened
    opened.close()


def _target(port: int) -> Target:
    return Target(node="here", address="127.0.0.1", port=port, purpose="test")


def test_a_port_that_listens_is_reached_until_it_is_closed(listeners: Listeners) -> None:
    port = listeners.open_ephemeral()
    assert connect_all([_target(port)], timeout_s=5) == []
    listeners.close()
    (failure,) = connect_all([_target(port)], timeout_s=5)
    assert failure.reason == "Connection refused"


def test_a_port_that_drops_connections_is_given_up_at_the_deadline() -> None:
    with socket.socket() as full:
        # The kernel drops what does not fit into the queue of a listener.
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        (failure,) = connect_all([_target(port)], timeout_s=0.3)
        for client in waiting:
            client.close()
    assert failure.reason == "no answer within 0.3 s"


def test_a_port_in_use_is_said_to_be_that_of_its_process(listeners: Listeners) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        (use,) = listeners.open([port])
    assert use.port == port
    assert "python" in use.process or "pytest" in use.process
    assert not use.is_ours


def test_the_last_free_port_of_a_range_is_opened(listeners: Listeners) -> None:
    first = listeners.open_in(31_000, 31_009)
    second = listeners.open_in(31_000, 31_009)
    assert first is not None
    assert second is not None
    assert 31_000 <= second < first <= 31_009
    assert listeners.open_in(first, first) is None


def test_many_targets_take_one_deadline_together() -> None:
    barrier = threading.Barrier(2, timeout=10)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def accept_both() -> None:
            for _ in range(2):
                server.accept()[0].close()
            barrier.wait()

        thread = threading.Thread(target=accept_both)
        thread.start()
        assert connect_all([_target(server.getsockname()[1])] * 2, timeout_s=5) == []
        barrier.wait()
        thread.join()


def test_a_worker_needs_the_head_and_every_other_worker() -> None:
    head, worker, other = cluster_node("h", Resources=HEAD), cluster_node("a"), cluster_node("b")
    opened = {"h": OPENED, "a": OPENED, "b": OPENED}
    targets = targets_of(worker, [head, worker, other], opened, gcs_port=6379)
    assert {(target.node, target.port) for target in targets} == {
        *(("h", 6379), ("h", 6380), ("h", 8076), ("h", 20_999), ("h", 40_000)),
        *(("b", 6380), ("b", 8076), ("b", 20_999), ("b", 40_000)),
    }
    from_head = targets_of(head, [head, worker, other], opened, gcs_port=6379)
    assert ("a", 52365) in {(target.node, target.port) for target in from_head}


def test_a_node_that_did_not_answer_is_no_target() -> None:
    head, worker = cluster_node("h", Resources=HEAD), cluster_node("a")
    assert targets_of(head, [head, worker], {"h": OPENED}, gcs_port=6379) == []


def test_a_connection_that_fails_names_both_nodes_and_the_port() -> None:
    target = Target(node="b", address="10.0.0.2", port=8076, purpose="object manager")
    (finding,) = check_reachable({"a": [Unreachable(target=target, reason="refused")], "b": []})
    assert finding.nodes == ("a", "b")
    assert finding.message == "a cannot connect to b port 8076 (object manager): refused"
    assert "open TCP 8076 from a to b" in finding.fix


def test_only_the_head_needs_the_port_of_the_service() -> None:
    assert ports_to_be_free(cluster_node("h", Resources=HEAD), serve_http=8000) == [8000]
    assert ports_to_be_free(cluster_node("a"), serve_http=8000) == []


def test_a_port_of_ray_is_free_and_one_of_another_program_is_not() -> None:
    def opened(is_ours: bool) -> OpenedPorts:
        use = PortUse(port=8000, process="nginx (pid 7)", is_ours=is_ours)
        return OpenedPorts(ephemeral=1, worker=2, in_use=(use,))

    assert list(check_free({"h": opened(is_ours=True)}, ClusterPorts())) == []
    (finding,) = check_free({"h": opened(is_ours=False)}, ClusterPorts())
    assert finding.message == "port 8000 (HTTP of Serve) is in use by nginx (pid 7)"


def test_a_full_range_of_worker_ports_is_an_error() -> None:
    full = OpenedPorts(ephemeral=1, worker=None, in_use=())
    (finding,) = check_free({"a": full}, ClusterPorts())
    assert "20000 to 20999" in finding.message


def test_ports_that_the_file_does_not_list_are_a_warning() -> None:
    assert list(check_listed([cluster_node("a")], ClusterPorts())) == []
    (finding,) = check_listed([cluster_node("a", ObjectManagerPort=43_211)], ClusterPorts())
    assert finding.message == "Ray's object-manager-port is 43211, the cluster file lists 8076"
