"""Loads the ranks of a 70B-shaped checkpoint, each in a process of its own, and compares the memory
with the planner's figures.

    python -m tests.support.load_70b_shape FOLDER            all ranks; prints JSON
    python -m tests.support.load_70b_shape FOLDER STAGE RANK  one rank

The checkpoint is written to FOLDER, without taking room there. A rank loads with the functions of
the workers. A tiny checkpoint is loaded before, to exclude what is loaded once: libraries, kernels.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from cluster.planning.checkpoint import read_shape
from cluster.planning.memory import memory_of
from cluster.planning.shapes import Load, Split, on_cpu
from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import load_draft_weights, load_verify_weights
from eesd_dist.engine.layout import layout_of
from eesd_dist.model.heads.head_config import HeadConfig
from eesd_dist.model.spec import ModelSpec
from eesd_dist.provenance import collect_provenance
from eesd_dist.transport.group_handles import UnconnectedGroup
from eesd_dist.types import LoadProgress
from tests.support.sparse_checkpoints import VOCABULARY, write_70b_shape, write_head_of
from tests.support.wide_checkpoints import write_wide_checkpoint

NUM_LAYERS = 4
EXIT_LAYER = 1
NUM_RANKS = 16
COMMAND = ("python", "-m", "tests.support.load_70b_shape", "FOLDER")


def write(folder: Path) -> int:
    """Writes target and exit head; returns the size of the target's files."""
    size = write_70b_shape(folder, num_layers=NUM_LAYERS)
    spec = ModelSpec.from_folder(folder)
    head = HeadConfig.for_target(
        folder, spec, exit_layer=EXIT_LAYER, kind="shared", num_tokens=VOCABULARY
    )
    write_head_of(folder / "exit_head", head.to_json(dtype="bfloat16", provenance={}))
    return size


def planned_bytes(folder: Path) -> dict[str, int]:
    """Returns the planner's weights of one rank, by stage, on a CPU."""
    split = Split(
        exit_layer=EXIT_LAYER,
        draft_tensor_parallel_size=NUM_RANKS,
        verify_tensor_parallel_size=NUM_RANKS,
    )
    shape = on_cpu(read_shape(folder))
    stages = memory_of(shape, split=split, load=Load())
    return {stage_memory.stage: stage_memory.weights_bytes for stage_memory in stages}


def measured(folder: Path, stage: str, rank: int) -> dict[str, float]:
    """Loads a rank in a process of its own; returns the bytes it keeps and its peak, both without
    those before the load, the bytes it has read, and the seconds."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.load_70b_shape", str(folder), stage, str(rank)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    figures: dict[str, float] = json.loads(run.stdout)
    return figures


def load(folder: Path, stage: str, rank: int) -> dict[str, float]:
    """Loads one rank in this process; returns the figures of `measured`."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as tiny:
        write_wide_checkpoint(
            Path(tiny), num_layers=2, hidden_size=256, intermediate_size=512, vocab_size=64
        )
        _load(Path(tiny), stage, rank=0, num_ranks=1)
    # Resets the high-water mark to the resident size (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    weights, last = _load(folder, stage, rank=rank, num_ranks=NUM_RANKS)
    figures = {
        "kept_bytes": _status("VmRSS") - before,
        "peak_bytes": _status("VmHWM") - before,
        "read_bytes": last.bytes_total,
        "seconds": round(last.seconds, 2),
    }
    del weights
    return figures


def _load(folder: Path, stage: str, *, rank: int, num_ranks: int) -> tuple[object, LoadProgress]:
    config = EngineConfig.model_validate(
        {
            "model": {"path": str(folder), "numerics": "fast", "device": "cpu"},
            "parallel": {
                "draft_tensor_parallel_size": num_ranks,
                "verify_tensor_parallel_size": num_ranks,
            },
        }
    )
    # Loading exchanges no messages, so the other ranks are not needed.
    group = UnconnectedGroup(rank=rank, size=num_ranks)
    seen: list[LoadProgress] = []
    weights: object
    if stage == "draft":
        weights = load_draft_weights(config, layout_of(config), group, on_progress=seen.append)
    else:
        weights = load_verify_weights(config, group, on_progress=seen.append)
    return weights, seen[-1]


def _status(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None, field
    return int(match[1]) * 1024


def compare(folder: Path) -> dict[str, object]:
    """Returns the figures of every rank of both stages, one process after the other."""
    size, planned = write(folder), planned_bytes(folder)
    ranks = []
    for stage in ("verify", "draft"):
        for rank in range(NUM_RANKS):
            figures = measured(folder, stage, rank)
            error = figures["kept_bytes"] / planned[stage] - 1
            ranks.append({"stage": stage, "rank": rank, **figures, "error": round(error, 4)})
    return {
        "num_layers": NUM_LAYERS,
        "exit_layer": EXIT_LAYER,
        "num_ranks": NUM_RANKS,
        "checkpoint_bytes": size,
        "planned_bytes": planned,
        "largest_error": max(abs(float(str(rank["error"]))) for rank in ranks),
        "ranks": ranks,
        "provenance": collect_provenance(command=COMMAND).as_json(),
    }


def main(folder: Path, *stage_and_rank: str) -> int:
    result = (
        load(folder, stage_and_rank[0], int(stage_and_rank[1]))
        if stage_and_rank
        else compare(folder)
    )
    sys.stdout.write(json.dumps(result, indent=None if stage_and_rank else 1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), *sys.argv[2:]))
