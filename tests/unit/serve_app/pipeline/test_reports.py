"""What a pipeline reports of its workers, for operators."""

from types import SimpleNamespace
from typing import cast

from eesd_dist.workers.messages import ProcessInfo, WorkerStatus
from serve_app.cli.pipelines import _tables
from serve_app.pipeline.reports import WorkerReport, slow_kernel_notes
from serve_app.pipeline.worker import Worker

_REASON = "products with 4096 x 14336 without Triton"


def _worker(name: str, *slow_kernels: str) -> Worker:
    status = WorkerStatus(epoch=1, progress=1, is_busy=False, slow_kernels=slow_kernels)
    process = ProcessInfo(pid=1, host="here", node_id="n")
    worker = SimpleNamespace(slot=SimpleNamespace(name=name), status=status, process_info=process)
    return cast("Worker", worker)


def test_slow_kernels_are_named_with_their_rank_in_health_and_list() -> None:
    workers = [_worker("drafting actor"), _worker("verify rank 0", _REASON)]
    assert slow_kernel_notes(workers) == [
        f"slow: verify rank 0 computes {_REASON}, which failed its self-check there"
    ]
    reports = [
        {"name": report.name, "slow_kernels": report.slow_kernels}
        for report in map(WorkerReport.of, workers)
    ]
    page = {
        "pipelines": [
            {
                **dict.fromkeys(("pipeline", "pid", "epoch", "num_live"), "p"),
                **dict.fromkeys(("unavailable", "draining"), ""),
                **dict.fromkeys(("kv_cache", "weight"), None),
                "workers": reports,
            }
        ],
        "starting": [],
        "fleet": None,
        "refused_settings": "",
    }
    assert list(_tables(page))[1:] == [f"p: slow: verify rank 0 computes {_REASON}"]
