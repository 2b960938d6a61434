"""Collectives equal a plain sum bit for bit, and errors name the missing rank."""

import gc
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from eesd_dist.errors import ConfigError, EngineError, PeerLost
from eesd_dist.transport import rendezvous
from eesd_dist.transport.authentication.handshake import Address
from eesd_dist.transport.authentication.key_store import StoreHost
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.transport.rendezvous import build_group, connect_store
from eesd_dist.transport.transfers import Tag, Transfer
from tests.dist.transport.peers import in_threads, join_threads

pytestmark = pytest.mark.dist

LATE_S = 10.0
"""Allowed delay of the end of a wait on a busy machine."""
_LARGE_BYTES = 256 << 20
_LATE_PART = -_LARGE_BYTES // 4
"""So far from the end that socket buffers hold much less."""


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
def test_all_reduce_is_the_sum_in_pairs_on_every_rank(
    three: list[ProcessGroup], dtype: torch.dtype, num_rows: int
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(num_rows, 192).to(dtype) for _ in three]
    expected = ((inputs[0].float() + inputs[1]) + inputs[2]).to(dtype)
    sums = on_every_rank(three, [x.clone() for x in inputs], lambda group, x: group.all_reduce(x))
    assert all(torch.equal(total, expected) for total in sums)  # type: ignore[arg-type]


def test_a_rows_sum_does_not_depend_on_the_other_rows(three: list[ProcessGroup]) -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(700, 192) for _ in three]
    many = on_every_rank(three, [x.clone() for x in inputs], lambda g, x: g.all_reduce(x))
    few = on_every_rank(three, [x[:2].clone() for x in inputs], lambda g, x: g.all_reduce(x))
    assert torch.equal(many[1][:2], few[2])  # type: ignore[index, arg-type]


def test_all_reduce_works_in_place_on_a_tensor_with_gaps(three: list[ProcessGroup]) -> None:
    inputs = [torch.full((4, 6), float(rank + 1))[:, ::2] for rank in range(3)]
    on_every_rank(three, inputs, lambda group, x: group.all_reduce(x))
    assert all(torch.equal(x, torch.full((4, 3), 6.0)) for x in inputs)


def test_all_gather_and_broadcast_bring_every_rank_the_same(three: list[ProcessGroup]) -> None:
    inputs = [torch.full((2,), rank) for rank in range(3)]
    gathered = on_every_rank(three, inputs, lambda group, x: group.all_gather(x))
    assert all(torch.stack(tensors).tolist() == [[0, 0], [1, 1], [2, 2]] for tensors in gathered)  # type: ignore[arg-type]
    on_every_rank(three, inputs, lambda group, x: group.broadcast(x, source=1))
    assert [x.tolist() for x in inputs] == [[1, 1]] * 3


def test_a_rank_that_does_not_take_part_is_named() -> None:
    first, second = join_threads(2, timeout_s=0.3)
    started_s = time.monotonic()
    with pytest.raises(
        PeerLost,
        match=r"lost threads rank 1 on 127\.0\.0\.1 during all_reduce \(epoch 1\): no answer "
        r"within 0\.3 s",
    ):
        first.all_reduce(torch.ones(3))
    assert time.monotonic() - started_s < LATE_S
    with pytest.raises(PeerLost, match=r"lost threads rank 0 on 127\.0\.0\.1 during all_reduce"):
        second.all_reduce(torch.ones(3))


def test_a_rank_that_never_joins_is_named() -> None:
    host = StoreHost()
    with pytest.raises(
        PeerLost, match=r"lost verify rank 1 during joining group verify of epoch 4: it did"
    ):
        build_group(
            connect_store(host.at, timeout_s=10),
            epoch=4,
            name="verify",
            rank=0,
            size=2,
            timeout_s=0.3,
            members=("verify rank 0", "verify rank 1"),
        )


def test_a_store_that_is_not_there_is_named_by_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    started_s = time.monotonic()
    with pytest.raises(PeerLost, match=rf"store at 127\.0\.0\.1:{port} .* within 0\.3 s"):
        connect_store(Address(host="127.0.0.1", port=port), timeout_s=0.3)
    assert time.monotonic() - started_s < LATE_S


def test_a_group_of_one_has_nothing_to_say() -> None:
    group: TensorGroup = SingleGroup()
    x = torch.ones(2)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) == [x]
    assert group.broadcast(x) is x


def test_every_kind_of_operation_is_counted_with_its_bytes_each_way() -> None:
    groups = join_threads(3)
    small, large = torch.zeros(10), torch.zeros(3 * 40_000)

    def act(group: ProcessGroup, x: Tensor) -> None:
        del x
        group.all_reduce(small.clone())
        group.all_reduce(large.clone())
        group.all_gather(small)
        group.broadcast(small.clone(), source=1)

    assert groups[0].counts().by_kind == {}
    on_every_rank(groups, [small] * 3, act)
    for rank, group in enumerate(groups):
        counts = group.counts()
        kinds = counts.by_kind
        assert {kind: count.number for kind, count in kinds.items()} == {
            "all_reduce": 2,
            "all_gather": 1,
            "broadcast": 1,
        }
        # The small one in full to two ranks; then a third of the large one, and its sum, to each of
        # two.
        reduced = 2 * small.nbytes + 2 * 2 * large.nbytes // 3
        assert kinds["all_reduce"].traffic.sent_bytes == reduced
        assert kinds["all_reduce"].traffic.received_bytes == reduced
        assert kinds["all_gather"].traffic.sent_bytes == 2 * small.nbytes
        assert kinds["broadcast"].traffic.sent_bytes == (2 * small.nbytes if rank == 1 else 0)
        assert kinds["broadcast"].traffic.received_bytes == (0 if rank == 1 else small.nbytes)
        assert counts.total.sent_bytes == sum(count.traffic.sent_bytes for count in kinds.values())


def test_a_rank_that_waits_for_a_late_one_counts_the_seconds_and_the_late_rank_does_not() -> None:
    early, slow = join_threads(2, timeout_s=20.0)

    def come_late() -> None:
        time.sleep(2.0)
        slow.all_reduce(torch.ones(3))

    in_threads(lambda: early.all_reduce(torch.ones(3)), come_late)
    assert 1.0 < early.counts().total.wait_s < 2.0 + LATE_S
    assert slow.counts().total.wait_s < early.counts().total.wait_s - 0.5


def test_a_collective_says_which_round_it_belonged_to() -> None:
    first, _second = join_threads(2, timeout_s=0.3)
    first.doing(17)
    with pytest.raises(PeerLost, match=r"during all_gather of round 17 \(epoch 1\)") as caught:
        first.all_gather(torch.ones(3))
    assert (caught.value.round_id, caught.value.epoch) == (17, 1)
    third, _fourth = join_threads(2, timeout_s=0.3)
    third.doing(8, of="command")
    with pytest.raises(PeerLost, match="during all_reduce of command 8 ") as caught:
        third.all_reduce(torch.ones(3))
    assert caught.value.round_id is None


class _Large:
    """A large message in transit between two threads."""

    def __init__(self) -> None:
        first, self._second = join_threads(2, timeout_s=60.0)
        content = torch.zeros(_LARGE_BYTES, dtype=torch.uint8)
        self._received = torch.ones_like(content)
        self.sending = self._second.isend(content, to=0, tag=Tag.ROUND, operation="a large send")
        self.receiving = first.irecv(
            self._received, source=1, tag=Tag.ROUND, operation="a large receive"
        )

    def give_up(self) -> None:
        """Aborts once the first byte has arrived."""
        deadline = time.monotonic() + 20.0
        while self._received[0]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self._second.abort("it was given up")

    @property
    def was_half_over(self) -> bool:
        """Whether the message was in transit when it was aborted."""
        return bool(self._received[_LATE_PART])


def _large_messages() -> Iterator[_Large]:
    """Yields messages until one was aborted in transit: some arrive too quickly."""
    for _ in range(10):
        large = _Large()
        yield large
        if large.was_half_over:
            return
    pytest.fail("all of them had come before they were given up")


def test_an_abort_ends_both_ends_of_a_message_in_transit() -> None:
    errors: list[PeerLost] = []

    def wait_for(transfer: Transfer) -> None:
        try:
            transfer.finish(timeout_s=60.0)
        except PeerLost as error:
            errors.append(error)

    for large in _large_messages():
        errors.clear()
        in_threads(
            partial(wait_for, large.sending), partial(wait_for, large.receiving), large.give_up
        )
    assert len(errors) == 2
    with pytest.raises(PeerLost, match=r"a large send .* it was given up"):
        large.sending.finish(timeout_s=60.0)
    with pytest.raises(PeerLost, match=r"a large receive .* its connection is gone"):
        large.receiving.finish(timeout_s=60.0)


def test_a_small_message_is_on_its_own_once_it_was_sent() -> None:
    first, second = join_threads(2, timeout_s=5.0)
    x = torch.full((3,), 7.0)
    first.isend(x, to=1, tag=Tag.ROUND, operation="a send").finish(timeout_s=5.0)
    x.zero_()
    received = second.recv(torch.zeros(3), source=0, tag=Tag.ROUND, operation="a receive")
    assert received.tolist() == [7.0] * 3


def test_small_messages_go_ahead_of_their_receiver_until_the_connection_is_full() -> None:
    first, _second = join_threads(2, timeout_s=0.3)
    messages: list[Tensor] = []

    def send_many() -> None:
        for _ in range(100_000):
            x = torch.ones(1000)
            first.isend(x, to=1, tag=Tag.ROUND, operation="a send").finish(timeout_s=0.3)
            messages.append(x)

    with pytest.raises(PeerLost, match=r"threads rank 1 on .* a send .*: no answer within 0\.3 s"):
        send_many()
    assert len(messages) > 16


def test_a_confirmed_message_waits_until_it_is_asked_for() -> None:
    first, _second = join_threads(2, timeout_s=0.3)
    with pytest.raises(PeerLost, match=r"during a last word .*: no answer within 0\.3 s"):
        first.send(torch.ones(3), to=1, tag=Tag.ROUND, operation="a last word")


def test_a_process_that_ends_with_a_group_ends_well() -> None:
    program = (
        "from tests.dist.transport.peers import join_threads\n"
        "import threading, torch\n"
        "first, second = join_threads(2)\n"
        "x = torch.zeros(1)\n"
        "waiting = first.irecv(x, source=1, tag=1, operation='a round')\n"
        "waits = threading.Thread(target=waiting.finish, kwargs={'timeout_s': None}, daemon=True)\n"
        "waits.start()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "terminate" not in ended.stderr


def test_a_group_without_references_closes_its_connections() -> None:
    first, second = join_threads(2, timeout_s=60.0)
    receiving = first.irecv(torch.ones(1), source=1, tag=Tag.ROUND, operation="a receive")
    del second
    gc.collect()
    with pytest.raises(PeerLost, match="its connection is gone"):
        receiving.finish(timeout_s=60.0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (torch.AcceleratorError, "verify rank 0 on .* failed on its own device during joining"),
        (torch.OutOfMemoryError, "verify rank 0 on .* failed on its own device during joining"),
        (torch.distributed.DistBackendError, "lost verify rank 1 on .* during joining"),
    ],
)
def test_a_group_of_gpus_that_do_not_connect_leaves_no_connection_and_names_the_cause(
    kind: type[RuntimeError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer_started = threading.Event()

    class Plane:
        lost = None

        def __init__(self, store: object, *, rank: int, **_: object) -> None:
            if rank == 0:
                peer_started.wait(10.0)
                raise kind("it is of no use")

        def abort(self) -> None:
            pass

    monkeypatch.setattr(rendezvous, "NcclPlane", Plane)
    host = StoreHost()
    groups: list[ProcessGroup] = []
    raised: list[EngineError] = []

    def join(rank: int) -> None:
        store = connect_store(host.at, timeout_s=10)
        try:
            groups.append(
                build_group(
                    store,
                    epoch=1,
                    name="verify",
                    rank=rank,
                    size=2,
                    timeout_s=20.0,
                    device="cuda",
                    members=("verify rank 0", "verify rank 1"),
                    in_memory=False,
                )
            )
        except EngineError as error:
            raised.append(error)
        peer_started.set()

    in_threads(lambda: join(0), lambda: join(1))
    assert len(raised) == 1, "it holds on to everything that was built"
    with pytest.raises(EngineError, match=message):
        raise raised[0]
    assert isinstance(raised[0], PeerLost) == (kind is torch.distributed.DistBackendError)
    with pytest.raises(PeerLost, match="its connection is gone"):
        groups[0].recv(torch.ones(1), source=0, operation="a receive")


def test_ranks_on_different_types_of_device_are_named_before_nccl_waits_for_one_of_them() -> None:
    host = StoreHost()
    raised: list[str] = []

    def join(rank: int, device: str) -> None:
        store = connect_store(host.at, timeout_s=10)
        with pytest.raises(ConfigError) as error:
            build_group(
                store, epoch=1, name="verify", rank=rank, size=2, timeout_s=20.0, device=device
            )
        raised.append(str(error.value))

    in_threads(lambda: join(0, "cuda"), lambda: join(1, "cpu"))
    assert raised[0] == raised[1]
    assert "verify rank 0 on 127.0.0.1: cuda, verify rank 1 on 127.0.0.1: cpu" in raised[0]
    assert "or set model.device to cpu" in raised[0]


def test_a_wait_for_a_peer_ends_when_its_store_is_left() -> None:
    host = StoreHost()
    store = connect_store(host.at, timeout_s=10)
    leaving = threading.Timer(0.3, store.close)
    leaving.start()
    started_s = time.monotonic()
    with pytest.raises(PeerLost, match="the rendezvous store during joining group verify"):
        build_group(store, epoch=1, name="verify", rank=0, size=2, timeout_s=60.0)
    assert time.monotonic() - started_s < LATE_S
