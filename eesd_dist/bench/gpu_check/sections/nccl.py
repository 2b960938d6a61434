"""Groups of ranks on the device: NCCL with one and two ranks, Gloo, and NCCL's deadline.

NCCL needs a GPU for each rank: for two ranks on one GPU the row has its error message.
"""

import re

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from eesd_dist.bench.gpu_check.report_rows import Rows
from eesd_dist.bench.gpu_check.sections.ranks import RankReport, exchange, run_ranks
from eesd_dist.bench.gpu_check.setting import Setting
from eesd_dist.errors import EesdError
from eesd_dist.transport.authentication.key_store import StoreHost
from eesd_dist.transport.nccl import NcclPlane
from eesd_dist.transport.rendezvous import build_group, connect_store

_LONGEST_S = 45.0
_MOST_RANKS = 4


def run(setting: Setting, rows: Rows) -> None:
    device = setting.device()
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if num_gpus:
        _alone(device, rows)
        devices = [f"cuda:{at % num_gpus}" for at in range(min(max(num_gpus, 2), _MOST_RANKS))]
        reports = run_ranks("exchange", devices, seconds=seconds_for(setting))
        together(f"NCCL, ranks on {', '.join(devices)}", reports, rows, refusable=num_gpus == 1)
    else:
        rows.cannot("NCCL group of one, of two", "needs cuda")
    lies = f"cpu<-{device}"
    reports = run_ranks("exchange", [lies, lies], seconds=seconds_for(setting))
    together(f"Gloo, two ranks, tensors from {device}", reports, rows, refusable=False)
    if num_gpus < 2:
        rows.cannot("NCCL abort while a kernel is stuck", "needs 2 GPUs")
        return
    reports = run_ranks("stuck", ["cuda:0", "cuda:1"], seconds=seconds_for(setting))
    rows.prove(
        "NCCL abort while a kernel is stuck",
        all(report.ok for report in reports),
        value=reports[0].seconds,
        unit="s",
        detail="; ".join(report.said for report in reports if report.said),
    )


def seconds_for(setting: Setting) -> float:
    return min(_LONGEST_S, setting.left_s)


def _alone(device: torch.device, rows: Rows) -> None:
    name = "NCCL, a group of one"
    host = StoreHost()
    try:
        group = build_group(
            connect_store(host.at, timeout_s=20.0),
            epoch=1,
            name="one",
            rank=0,
            size=1,
            timeout_s=20.0,
            device=device,
        )
        ok = exchange(group, device)
        group.abort()
        ok = ok and _moves(device)
    except (EesdError, RuntimeError) as error:
        rows.prove(name, False, detail=" ".join(str(error).split()))
        return
    rows.prove(name, ok, detail="gathered and aborted")


def _moves(device: torch.device) -> bool:
    """Checks the operations of sums over three or more ranks, from a rank to itself."""
    plane = NcclPlane(
        HashStore(),
        rank=0,
        size=1,
        timeout_s=20.0,
        join_timeout_s=20.0,
        device=device,
    )
    x = torch.arange(1_000.0, device=device).view(1, -1)
    gathered = plane.all_gather(x, operation="all_gather")
    swapped = plane.all_to_all(x, operation="all_to_all")
    torch.cuda.synchronize(device)
    plane.abort()
    return torch.equal(gathered[0], x) and torch.equal(swapped, x)


def together(
    name: str,
    reports: list[RankReport],
    rows: Rows,
    *,
    refusable: bool,
    proven: str = "sum, gather and broadcast",
) -> None:
    """Emits one row for all ranks."""
    said = " | ".join(dict.fromkeys(report.said for report in reports if report.said))
    refused = re.search(r"Duplicate GPU.{0,80}", said)
    if refusable and refused and not any(report.formed for report in reports):
        rows.measure(name, "refused", detail=refused[0])
        return
    rows.prove(
        name,
        all(report.ok for report in reports),
        value=max(report.seconds for report in reports),
        unit="s",
        detail=said or proven,
    )
