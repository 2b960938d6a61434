"""Creation and end of a communicator, tested without a GPU.

Tensors are fake ones on cuda:0. torch's check of the device runs; only the driver call behind it is
recorded. The backend is a toy with work that never ends.
"""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor
from torch._C import _distributed_c10d
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import Store

from eesd_dist.engine.layout import device_named
from eesd_dist.errors import ConfigError
from eesd_dist.transport import rendezvous
from eesd_dist.transport.nccl import NcclPlane
from eesd_dist.transport.symmetric import sums
from tests.support.fake_cuda import NoLaunch

GPU = torch.device("cuda", 0)


class Work:
    def __init__(self, *, fails: bool) -> None:
        self._fails = fails

    def wait(self, timeout: timedelta | None = None) -> None:
        if self._fails and timeout is not None:
            raise torch.distributed.DistBackendError("NCCL error: remote process exited")

    def is_completed(self) -> bool:
        return False


class Stream:
    """A stream of which the device finishes nothing."""

    is_capturing = False

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(query=lambda: False)


class Backend:
    """A backend with work that never ends."""

    Options = SimpleNamespace
    fails = False
    backends: "list[Backend]"

    def __init__(self, store: Store, rank: int, size: int, options: object) -> None:
        self.size = size
        self.asked: list[str] = []
        self.num_aborts = 0
        self.was_aborted = threading.Event()
        self.backends.append(self)

    def allreduce(self, tensors: list[Tensor]) -> Work:
        self.asked.append("allreduce")
        return Work(fails=self.fails)

    def _allgather_base(self, output: Tensor, input: Tensor) -> Work:
        assert output.is_contiguous()
        assert input.is_contiguous()
        assert output.numel() == self.size * input.numel()
        self.asked.append("allgather")
        return Work(fails=self.fails)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Work:
        assert output.shape == input.shape
        assert output.shape[0] == self.size
        assert (output_splits, input_splits) == ([], [])
        self.asked.append("alltoall")
        return Work(fails=self.fails)

    def abort(self) -> None:
        self.num_aborts += 1
        self.was_aborted.set()


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Backend]]:
    class Own(Backend):
        pass

    Own.backends = []
    monkeypatch.setattr(_distributed_c10d, "ProcessGroupNCCL", Own, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Stream.is_capturing)
    monkeypatch.setattr(sums, "gathered_sum_kernel", NoLaunch())
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    with FakeTensorMode():
        yield Own
    assert all(instance.num_aborts == 1 for instance in Own.backends)


@pytest.fixture(autouse=True)
def current_devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the calls of `torch.cuda.set_device` to the driver; the rest of it is real."""
    indices: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", indices.append, raising=False)
    return indices


def make_plane(
    *,
    timeout_s: float = 60.0,
    device: torch.device = GPU,
    size: int = 2,
    ordered_sums: bool = True,
) -> NcclPlane:
    return NcclPlane(
        cast(Store, None),
        rank=0,
        size=size,
        timeout_s=timeout_s,
        join_timeout_s=1.0,
        device=device,
        ordered_sums=ordered_sums,
    )


def watchdogs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nccl watchdog"]


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_plane_forms_on_the_device_that_the_configuration_means(
    monkeypatch: pytest.MonkeyPatch, current_devices: list[int], name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plane = make_plane(device=device_named(name))
    assert current_devices == [0]
    plane.abort()


def test_the_configuration_means_the_current_device(
    monkeypatch: pytest.MonkeyPatch, current_devices: list[int]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    plane = make_plane(device=device_named("cuda"))
    assert current_devices == [2]
    plane.abort()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_device_that_is_no_single_gpu_is_refused_by_name(
    current_devices: list[int], device: str, backend: type[Backend]
) -> None:
    with pytest.raises(ConfigError, match=rf"on device {device}: expected one GPU with its index"):
        make_plane(device=torch.device(device))
    assert (current_devices, backend.backends) == ([], [])


def test_a_device_that_torch_does_not_see_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigError, match=r"model\.device is cuda and torch sees no CUDA device"):
        device_named("cuda")
    assert device_named("auto") == torch.device("cpu")


def test_a_plane_without_references_is_aborted_and_its_watchdog_ends(
    backend: type[Backend],
) -> None:
    before = watchdogs()
    plane = make_plane()
    (own,) = [thread for thread in watchdogs() if thread not in before]
    plane.all_reduce(torch.zeros(1, device=GPU), operation="all_reduce of round 7")
    del plane
    gc.collect()
    assert backend.backends[0].num_aborts == 1
    own.join(5.0)
    assert not own.is_alive()


def test_a_plane_that_is_not_used_yet_goes_as_well() -> None:
    before = watchdogs()
    plane = make_plane()
    (own,) = [thread for thread in watchdogs() if thread not in before]
    gone = weakref.ref(plane)
    del plane
    gc.collect()
    assert gone() is None
    own.join(5.0)
    assert not own.is_alive()


def test_a_plane_with_a_failing_first_collective_is_aborted_though_its_error_is_kept(
    backend: type[Backend],
) -> None:
    before = watchdogs()
    backend.fails = True
    with pytest.raises(torch.distributed.DistBackendError) as failure:
        make_plane()
    assert backend.backends[0].num_aborts == 1
    for own in set(watchdogs()) - set(before):
        own.join(5.0)
        assert not own.is_alive()
    del failure


def test_work_that_is_late_aborts_once_and_is_named(backend: type[Backend]) -> None:
    plane = make_plane(timeout_s=0.05)
    plane.all_reduce(torch.zeros(1, device=GPU), operation="all_reduce of round 7")
    assert backend.backends[0].was_aborted.wait(5.0)
    assert plane.lost == "all_reduce of round 7"
    plane.abort()


def test_what_is_captured_has_no_deadline_and_its_replay_has(
    backend: type[Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = make_plane(timeout_s=0.05)
    with monkeypatch.context() as patch:
        patch.setattr(Stream, "is_capturing", True)
        plane.all_reduce(torch.zeros(1, device=GPU), operation="all_reduce of round 7")
    assert not backend.backends[0].was_aborted.wait(0.3)
    plane.watch_queued(operation="graph of round 8")
    assert backend.backends[0].was_aborted.wait(5.0)
    assert plane.lost == "graph of round 8"


def test_work_of_a_communicator_in_error_is_late_at_once(
    backend: type[Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch calls its first work, which it asks for errors, completed."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    plane = make_plane(timeout_s=60.0)

    def raises(timeout: timedelta | None = None) -> None:
        raise torch.distributed.DistBackendError("NCCL error: remote process exited")

    first = cast(torch.distributed.Work, SimpleNamespace(is_completed=lambda: True, wait=raises))
    plane._firsts[:] = [first]
    plane.watch_queued(operation="graph of round 8")
    assert backend.backends[0].was_aborted.wait(5.0)
    assert plane.lost == "graph of round 8"


def test_an_abort_ends_sums_in_memory_before_the_communicator(backend: type[Backend]) -> None:
    """The abort of a communicator may wait for kernels."""
    plane, ended = make_plane(), []

    class Sums:
        def abort(self) -> None:
            ended.append(backend.backends[0].num_aborts)

    plane.sum_in_memory(Sums())  # type: ignore[arg-type]
    plane.abort()
    assert ended == [0]


def test_a_plane_is_aborted_only_once() -> None:
    plane = make_plane()
    plane.abort()
    plane.abort()
    assert plane.lost is None


@pytest.mark.parametrize(
    ("size", "ordered_sums", "num_rows", "operations"),
    [
        (2, True, 16, ["allreduce"]),
        (4, True, 16, ["allgather"]),
        (4, True, 17, ["allgather"]),
        (4, True, 4_001, ["alltoall", "allgather"]),
        (4, False, 16, ["allreduce"]),
    ],
)
def test_from_three_ranks_on_sums_are_gathered_and_added_here(
    backend: type[Backend], size: int, ordered_sums: bool, num_rows: int, operations: list[str]
) -> None:
    plane = make_plane(size=size, ordered_sums=ordered_sums)
    x = torch.zeros(num_rows, 191, dtype=torch.bfloat16, device=GPU)
    plane.all_reduce(x, operation="all_reduce of round 7")
    assert backend.backends[0].asked == ["allreduce", *operations]
    plane.abort()


class InMemory:
    """Sums of a node that launch nothing."""

    def fits(self, x: Tensor) -> bool:
        return True

    def fits_gather(self, x: Tensor) -> bool:
        return True

    def sum(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty_like(x, dtype=dtype)

    def gather(self, x: Tensor) -> Tensor:
        return x.new_empty((2, *x.shape))

    def abort(self) -> None:
        return


def test_nodes_exchange_their_sums_as_float32_and_both_communicators_are_aborted(
    backend: type[Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanged: list[Tensor] = []
    gather = backend._allgather_base

    def gathering(self: Backend, output: Tensor, input: Tensor) -> Work:
        exchanged.append(input)
        return gather(self, output, input)

    monkeypatch.setattr(backend, "_allgather_base", gathering)
    plane = make_plane(size=4)
    store = cast(Store, None)
    plane.sum_over_nodes(InMemory(), store, node=0, num_nodes=2, timeout_s=1.0)  # type: ignore[arg-type]
    everyone, over_nodes = backend.backends
    assert (everyone.size, over_nodes.size) == (4, 2)
    x = torch.zeros(3, 5, dtype=torch.bfloat16, device=GPU)
    total = plane.all_reduce(x, operation="all_reduce of round 7")
    assert (total.shape, total.dtype) == (x.shape, x.dtype)
    assert over_nodes.asked == ["allreduce", "allgather"]
    assert [x.dtype for x in exchanged] == [torch.float32]
    assert plane.all_gather(x, operation="all_gather of round 7").shape == (4, 3, 5)
    assert everyone.asked == ["allreduce", "allgather"]
    plane.abort()
    assert over_nodes.num_aborts == 1


@pytest.mark.parametrize(
    ("size", "num_rows", "operations"),
    [(2, 16, ["allreduce"]), (4, 16, ["allgather"]), (4, 4_001, ["alltoall", "allgather"])],
)
def test_what_a_graph_cannot_hold_is_given_to_its_capture(
    backend: type[Backend], size: int, num_rows: int, operations: list[str]
) -> None:
    plane = make_plane(timeout_s=0.05, size=size)
    calls = backend.backends[0].asked
    cuts: list[Callable[[], None]] = []

    def cut(exchange: Callable[..., None], *tensors: Tensor) -> None:
        cuts.append(lambda: exchange(*tensors, operation="replay of round 8"))

    with plane.capturing(cut):
        plane.all_reduce(torch.zeros(num_rows, 191, device=GPU), operation="all_reduce of round 7")
    assert calls == ["allreduce"]
    assert not backend.backends[0].was_aborted.wait(0.2)
    for exchange in cuts:
        exchange()
    assert calls == ["allreduce", *operations]
    assert backend.backends[0].was_aborted.wait(5.0)
    assert plane.lost == "replay of round 8"


@pytest.mark.parametrize(
    ("per_node", "expected"),
    [
        (4, ["memory"] * 4),
        (
            2,
            [
                ("check local rank 0", 0, 2),
                ("check local rank 1", 0, 2),
                ("check local rank 0", 1, 2),
                ("check local rank 1", 1, 2),
            ],
        ),
        (None, []),
    ],
)
def test_ranks_join_those_of_their_place_on_other_nodes(
    per_node: int | None, expected: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    memberships: list[object] = []

    class Plane:
        def sum_in_memory(self, symmetric: object) -> None:
            memberships.append("memory")

        def sum_over_nodes(
            self, symmetric: object, store: str, *, node: int, num_nodes: int, timeout_s: float
        ) -> None:
            memberships.append((store, node, num_nodes))

    symmetric = "no memory" if per_node is None else SimpleNamespace(size=per_node)
    monkeypatch.setattr(sums, "join_symmetric", lambda *_, **__: symmetric)
    for rank in range(4):
        exchange = SimpleNamespace(
            rank=rank,
            timeout_s=1.0,
            left_s=lambda: 1.0,
            store=lambda name, timeout_s: name.replace("nccl", "check"),
        )
        rendezvous._sum_in_memory(
            cast(NcclPlane, Plane()),
            cast(rendezvous._Exchange, exchange),
            size=4,
            device=GPU,
            name="verify",
            address="10.0.0.1",
        )
    assert memberships == expected


def test_communicators_are_aborted_at_once(backend: type[Backend]) -> None:
    """The abort of one may wait for the kernels of another one, which only its own abort ends."""
    plane = make_plane(size=4)
    plane.sum_over_nodes(
        InMemory(),  # type: ignore[arg-type]
        cast(Store, None),
        node=0,
        num_nodes=2,
        timeout_s=1.0,
    )
    meeting = threading.Barrier(2, timeout=10.0)
    for instance in backend.backends:
        abort = instance.abort

        def abort_together(abort: Callable[[], None] = abort) -> None:
            meeting.wait()
            abort()

        instance.abort = abort_together  # type: ignore[method-assign]
    plane._aborts[:] = [instance.abort for instance in backend.backends]
    plane.abort()
    assert [instance.num_aborts for instance in backend.backends] == [1, 1]


def test_a_graph_does_not_keep_a_plane(backend: type[Backend]) -> None:
    plane, exchanges = make_plane(size=4), []

    def cut(exchange: Callable[..., None], *tensors: Tensor) -> None:
        exchanges.append(exchange)

    with plane.capturing(cut):
        plane.all_gather(torch.zeros(3, device=GPU), operation="all_gather of round 7")
    del plane
    gc.collect()
    assert backend.backends[0].num_aborts == 1
    with pytest.raises(RuntimeError, match="given up"):
        exchanges[0](torch.zeros(4, 3), torch.zeros(3), operation="replay of round 8")
