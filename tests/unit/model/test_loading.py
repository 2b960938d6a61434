"""Loading the weights of a rank in pieces: what is read, when, at what cost, and how it is
reported."""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from eesd_dist.errors import CheckpointError
from eesd_dist.model import rank_memory
from eesd_dist.model.loading import LoadUnit, load_units, unwatched
from eesd_dist.model.rank_memory import NUM_READERS, num_read_ahead
from eesd_dist.model.span import LlamaSpan
from eesd_dist.model.spec import ModelSpec
from eesd_dist.model.weights import Checkpoint, TensorSource
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.types import LoadProgress
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_checkpoints import save_tiny_model
from tests.support.wide_checkpoints import write_wide_checkpoint

MIB = 2**20


def _load(folder: Path, first: int, last: int, group: Any = None) -> list[LoadProgress]:
    seen: list[LoadProgress] = []
    LlamaSpan.load(
        folder,
        ModelSpec.from_folder(folder),
        first,
        last,
        group=group or SingleGroup(),
        dtype="float32",
        numerics="fast",
        device=torch.device("cpu"),
        num_pages=1,
        page_size=16,
        on_progress=seen.append,
    )
    return seen


def _stored_bytes(folder: Path, *, without: tuple[str, ...]) -> int:
    """Returns the bytes of all tensors, from the headers of the files."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  not a dict
                if not name.startswith(without):
                    tensor = opened.get_tensor(name)
                    total += tensor.numel() * tensor.element_size()
    return total


def test_progress_counts_the_bytes_of_the_files_and_ends_with_all_of_them(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, max_shard_size="100KB")
    seen = _load(tmp_path, 1, 3)
    assert [p.piece for p in seen] == ["", "layer 1", "layer 2", "LM head"]
    done = [p.bytes_done for p in seen]
    assert done == sorted(set(done))
    assert done[0] == 0
    assert done[-1] == seen[0].bytes_total
    assert done[-1] == _stored_bytes(tmp_path, without=("model.layers.0.", "model.embed"))


def test_two_ranks_together_read_each_matrix_once(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    totals = on_ranks(2, lambda group: _load(tmp_path, 1, 3, group)[-1].bytes_total)
    norms = 4 * 64 * (2 * 2 + 1)  # float32, hidden size 64: two a layer, and the last; on each rank
    whole = _stored_bytes(tmp_path, without=("model.layers.0.", "model.embed"))
    assert sum(totals) == whole + norms


def test_a_missing_tensor_is_found_before_anything_is_read(tmp_path: Path) -> None:
    write_wide_checkpoint(
        tmp_path, num_layers=3, hidden_size=64, intermediate_size=64, vocab_size=64
    )
    last = "model-00003-of-00004.safetensors"
    (tmp_path / last).unlink()
    seen: list[LoadProgress] = []
    with pytest.raises(CheckpointError, match=last):
        seen += _load(tmp_path, 0, 3)
    assert seen == []


class _Watched:
    """Pieces of one tensor that record when they are read, and wait for those ahead of them."""

    def __init__(self, names: str, *, num_prefetched: int) -> None:
        self.read: list[str] = []
        self.packed: list[str] = []
        self.most_ahead = 0
        self._was_read = {name: threading.Event() for name in names}
        self.units = [
            self._unit(name, names[at + 1 : at + 1 + num_prefetched])
            for at, name in enumerate(names)
        ]

    def _unit(self, name: str, prefetched: str) -> LoadUnit[Tensor]:
        def read(source: TensorSource) -> Tensor:
            tensor = source.read("model.norm.weight", shape=(64,), dtype=torch.float32)
            if tensor.device.type != "meta":
                self.read.append(name)
                self._was_read[name].set()
            return tensor

        def pack(tensor: Tensor) -> None:
            for next_name in prefetched:  # only the reading threads can read them now
                assert self._was_read[next_name].wait(10)
            self.most_ahead = max(self.most_ahead, len(self.read) - len(self.packed) - 1)
            self.packed.append(name)

        return LoadUnit(name=name, read=read, pack=pack)


@pytest.mark.parametrize(("budget", "num_prefetched"), [(1, 1), (2 * 256, 2), (2**30, NUM_READERS)])
def test_pieces_are_packed_in_order_while_as_many_as_fit_the_budget_are_read_ahead(
    budget: int, num_prefetched: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path)
    monkeypatch.setattr(rank_memory, "READ_AHEAD_BYTES", budget)  # a piece has 256 bytes
    watched = _Watched("abcdefghij", num_prefetched=num_prefetched)
    load_units(tmp_path, watched.units, on_progress=unwatched)
    assert "".join(watched.packed) == "abcdefghij"
    assert sorted(watched.read) == watched.packed
    assert watched.most_ahead == num_prefetched


def test_readers_stop_at_the_budget_and_read_one_piece_that_is_larger() -> None:
    gib = 2**30
    assert num_read_ahead([]) == 0
    assert num_read_ahead([3 * gib, 1]) == 1
    assert num_read_ahead([gib // 2, gib // 2, 1]) == 2
    assert num_read_ahead([1, 2 * gib, 1]) == 1
    assert num_read_ahead([1] * 9) == NUM_READERS


def test_weights_are_counted_exactly_though_several_threads_read(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)  # float32
    with Checkpoint(tmp_path) as checkpoint, ThreadPoolExecutor(8) as readers:

        def read(_: int) -> Tensor:
            return checkpoint.read("model.norm.weight", shape=(64,), dtype=torch.bfloat16)

        first, *others = readers.map(read, range(400))
        assert checkpoint.rounding.num_read == 400 * 64
        assert checkpoint.rounding.num_changed % 400 == 0
        assert checkpoint.rounding.num_changed > 0
        assert all(torch.equal(first, other) for other in others)
        checkpoint.rounding.num_changed = 0  # no warning


def test_what_breaks_the_reading_is_raised_to_the_loader(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)

    def read(source: TensorSource) -> Tensor:
        tensor = source.read("model.norm.weight", shape=(64,), dtype=torch.float32)
        if tensor.device.type != "meta":
            raise CheckpointError(file="f", found="a hole", expected="none")
        return tensor

    unit = LoadUnit(name="a", read=read, pack=lambda tensor: None)
    with pytest.raises(CheckpointError, match="a hole"):
        load_units(tmp_path, [unit], on_progress=unwatched)


def test_what_was_read_outlives_its_file(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        norm_D = checkpoint.read("model.norm.weight", shape=(64,), dtype=torch.float32)
        assert str(tmp_path) in Path("/proc/self/maps").read_text()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert norm_D.shape == (64,)


@contextmanager
def _without_root() -> Iterator[None]:
    """Drops root privileges, since root may read every file."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_that_may_not_be_read_is_named_with_the_user() -> None:
    with tempfile.TemporaryDirectory() as name:  # the folders of pytest are closed to other users
        folder = Path(name)
        save_tiny_model(folder)
        folder.chmod(0o755)
        (folder / "model.safetensors").chmod(0)
        with (
            _without_root(),
            pytest.raises(CheckpointError, match=rf"model\.safetensors.*user {os.geteuid()}"),
        ):
            _load(folder, 0, 3)


def test_a_rank_of_four_never_holds_more_than_its_share_and_a_few_pieces(tmp_path: Path) -> None:
    size = write_wide_checkpoint(
        tmp_path, num_layers=12, hidden_size=1024, intermediate_size=4096, vocab_size=4096
    )
    try:
        run = subprocess.run(
            [sys.executable, "-m", "tests.support.load_rank", str(tmp_path), "1", "4"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        report = json.loads(run.stdout)
    finally:
        shutil.rmtree(tmp_path)
    assert size > 350 * MIB
    # The embedding is replicated on every rank.
    embedding = 4096 * 1024 * 2
    assert math.isclose(report["share_bytes"], (size - embedding) / 4 + embedding, rel_tol=0.01)
    assert report["kept_bytes"] <= 1.2 * report["share_bytes"] + 8 * MIB
    # In addition: the current layer, those ahead, their mapped pages, one matrix in float32.
    layer = report["share_bytes"] / 12
    assert (
        report["peak_bytes"]
        <= 1.2 * report["share_bytes"] + (2 + 2 * NUM_READERS) * layer + 8 * MIB
    )
    assert report["peak_bytes"] < size / 2
    assert not report["mapped"]


_LOADS_TWO_LAYERS = """
import sys
import torch
from pathlib import Path
from eesd_dist.model.span import LlamaSpan
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport.group_handles import SingleGroup
folder = Path(sys.argv[1])
LlamaSpan.load(
    folder, ModelSpec.from_folder(folder), 0, 2, group=SingleGroup(), dtype="float32",
    numerics="invariant", device=torch.device("cpu"), num_pages=1, page_size=16,
)
sys.exit(", ".join({"sympy", "torch._dynamo"} & set(sys.modules)) or None)
"""


def test_sizes_are_counted_without_the_compiler_of_torch(tmp_path: Path) -> None:
    # Some operations on `meta` import it: a second of CPU in every worker that starts.
    save_tiny_model(tmp_path)
    command = [sys.executable, "-c", _LOADS_TWO_LAYERS, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
