"""Groups of ranks on the device: NCCL alone, NCCL between two, through the host, and its deadline.

NCCL wants a GPU for each rank: of two on one card it is told what it said.
"""

import re

import torch

from eesd_dist.bench.gpu_check.ranks import RankReport, exchange, run_ranks
from eesd_dist.bench.gpu_check.rows import Rows
from eesd_dist.bench.gpu_check.setting import Setting
from eesd_dist.errors import EesdError
from eesd_dist.transport.rendezvous import StoreHost, build_group

_LONGEST_S = 45.0


def run(setting: Setting, rows: Rows) -> None:
    device = setting.device()
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if num_gpus:
        _alone(device, rows)
        second = f"cuda:{1 % num_gpus}"
        reports = run_ranks("exchange", ["cuda:0", second], seconds=_seconds(setting))
        _together(f"NCCL, ranks on cuda:0 and {second}", reports, rows, refusable=num_gpus == 1)
    else:
        rows.cannot("NCCL group of one, of two", "needs cuda")
    lies = f"cpu<-{device}"
    reports = run_ranks("exchange", [lies, lies], seconds=_seconds(setting))
    _together(f"Gloo, two ranks, tensors from {device}", reports, rows, refusable=False)
    if num_gpus < 2:
        rows.cannot("NCCL abort while a kernel is stuck", "needs 2 GPUs")
        return
    reports = run_ranks("stuck", ["cuda:0", "cuda:1"], seconds=_seconds(setting))
    rows.prove(
        "NCCL abort while a kernel is stuck",
        all(report.ok for report in reports),
        value=reports[0].seconds,
        unit="s",
        detail="; ".join(report.said for report in reports if report.said),
    )


def _seconds(setting: Setting) -> float:
    return min(_LONGEST_S, setting.left_s)


def _alone(device: torch.device, rows: Rows) -> None:
    name = "NCCL, a group of one"
    try:
        group = build_group(
            StoreHost().store,
            generation=1,
            name="one",
            rank=0,
            size=1,
            timeout_s=20.0,
            device=device,
        )
        ok = exchange(group, device)
        group.abort()
    except (EesdError, RuntimeError) as error:
        rows.prove(name, False, detail=" ".join(str(error).split()))
        return
    rows.prove(name, ok, detail="gathered and aborted")


def _together(name: str, reports: list[RankReport], rows: Rows, *, refusable: bool) -> None:
    said = " | ".join(dict.fromkeys(report.said for report in reports if report.said))
    if refusable and not any(report.formed for report in reports):
        found = re.search(r"Duplicate GPU.{0,80}", said)
        rows.measure(name, "refused" if found else "not formed", detail=found[0] if found else said)
        return
    rows.prove(
        name,
        all(report.ok for report in reports),
        value=max(report.seconds for report in reports),
        unit="s",
        detail=said or "sum, gather and broadcast",
    )
