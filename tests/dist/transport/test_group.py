"""Collectives agree bit for bit with a plain sum, and errors say who is missing."""

import socket
import time

import pytest
import torch
from torch import Tensor

from eesd_dist.errors import PeerLost
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.transport.group import ProcessGroup, SingleGroup
from eesd_dist.transport.rendezvous import StoreHost, build_group, connect_store
from tests.dist.transport.peers import in_threads, join_threads

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def three() -> list[ProcessGroup]:
    return join_threads(3)


def on_every_rank(groups: list[ProcessGroup], inputs: list[Tensor], act: object) -> list[object]:
    results: dict[int, object] = {}

    def job(rank: int) -> None:
        results[rank] = act(groups[rank], inputs[rank])  # type: ignore[operator]

    in_threads(*(lambda rank=rank: job(rank) for rank in range(len(groups))))
    return [results[rank] for rank in range(len(groups))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [2, 700])
def test_all_reduce_is_the_sum_in_rank_order_on_every_rank(
    three: list[ProcessGroup], dtype: torch.dtype, num_rows: int
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(num_rows, 192).to(dtype) for _ in three]
    expected = ((inputs[0].float() + inputs[1]) + inputs[2]).to(dtype)
    sums = on_every_rank(three, [x.clone() for x in inputs], lambda group, x: group.all_reduce(x))
    assert all(torch.equal(total, expected) for total in sums)  # type: ignore[arg-type]


def test_a_rows_sum_does_not_depend_on_the_rows_beside_it(three: list[ProcessGroup]) -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(700, 192) for _ in three]
    many = on_every_rank(three, [x.clone() for x in inputs], lambda g, x: g.all_reduce(x))
    few = on_every_rank(three, [x[:2].clone() for x in inputs], lambda g, x: g.all_reduce(x))
    assert torch.equal(many[1][:2], few[2])  # type: ignore[index]


def test_all_reduce_works_in_place_on_a_tensor_with_gaps(three: list[ProcessGroup]) -> None:
    inputs = [torch.full((4, 6), float(rank + 1))[:, ::2] for rank in range(3)]
    on_every_rank(three, inputs, lambda group, x: group.all_reduce(x))
    assert all(torch.equal(x, torch.full((4, 3), 6.0)) for x in inputs)


def test_all_gather_and_broadcast_bring_every_rank_the_same(three: list[ProcessGroup]) -> None:
    inputs = [torch.full((2,), rank) for rank in range(3)]
    gathered = on_every_rank(three, inputs, lambda group, x: group.all_gather(x))
    assert all(torch.stack(parts).tolist() == [[0, 0], [1, 1], [2, 2]] for parts in gathered)  # type: ignore[arg-type]
    on_every_rank(three, inputs, lambda group, x: group.broadcast(x, source=1))
    assert [x.tolist() for x in inputs] == [[1, 1]] * 3


def test_a_rank_that_does_not_take_part_is_named() -> None:
    first, second = join_threads(2, timeout_s=0.3)
    started_s = time.monotonic()
    with pytest.raises(
        PeerLost, match=r"lost threads rank 1 during all_reduce: no answer within 0\.3 s"
    ):
        first.all_reduce(torch.ones(3))
    assert time.monotonic() - started_s < 2.0
    with pytest.raises(PeerLost, match="lost threads rank 0 during all_reduce"):
        second.all_reduce(torch.ones(3))


def test_a_rank_that_never_joins_is_named() -> None:
    host = StoreHost()
    with pytest.raises(
        PeerLost, match=r"lost verify rank 1 during joining group verify of generation 4: it did"
    ):
        build_group(
            host.store,
            generation=4,
            name="verify",
            rank=0,
            size=2,
            timeout_s=0.3,
            members=("verify rank 0", "verify rank 1"),
        )


def test_a_store_that_is_not_there_is_named_by_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    started_s = time.monotonic()
    with pytest.raises(PeerLost, match=rf"store at 127\.0\.0\.1:{port} .* within 0\.3 s"):
        connect_store("127.0.0.1", port, timeout_s=0.3)
    assert time.monotonic() - started_s < 2.0


def test_a_group_of_one_has_nothing_to_say() -> None:
    group: TensorGroup = SingleGroup()
    x = torch.ones(2)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) == [x]
    assert group.broadcast(x) is x
