"""Loads one rank's shard of a checkpoint and prints the memory that this took: run as a program.

    python -m tests.support.load_rank FOLDER RANK SIZE

Runs in a separate process, so that no other memory is counted. A tiny checkpoint is loaded first,
to exclude what is loaded once: libraries, self-checks, compiled kernels.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import torch

from eesd_dist.model.span import LlamaSpan
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport.group_handles import UnconnectedGroup
from eesd_dist.types import LoadProgress
from tests.support.wide_checkpoints import write_wide_checkpoint


def main(folder: Path, rank: int, size: int) -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as tiny:
        write_wide_checkpoint(
            Path(tiny), num_layers=1, hidden_size=256, intermediate_size=512, vocab_size=64
        )
        _load(Path(tiny), rank=0, size=1)
    # Resets the high-water mark to the resident size (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    span, seen = _load(folder, rank=rank, size=size)
    figures = {
        "peak_bytes": _status("VmHWM") - before,
        "kept_bytes": _status("VmRSS") - before,
        "share_bytes": seen[-1].bytes_total,
        "mapped": str(folder) in Path("/proc/self/maps").read_text(),
        "num_layers": span.last,
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    return 0


def _load(folder: Path, *, rank: int, size: int) -> tuple[LlamaSpan, list[LoadProgress]]:
    spec = ModelSpec.from_folder(folder)
    seen: list[LoadProgress] = []
    span = LlamaSpan.load(
        folder,
        spec,
        0,
        spec.num_layers,
        # Loading exchanges no messages, so the other ranks are not needed.
        group=UnconnectedGroup(rank=rank, size=size),
        dtype="bfloat16",
        numerics="fast",
        device=torch.device("cpu"),
        num_pages=1,
        page_size=16,
        on_progress=seen.append,
    )
    return span, seen


def _status(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None, field
    return int(match[1]) * 1024


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
