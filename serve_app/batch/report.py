"""The figures of a batch, for people and as JSON."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from typer import echo

from eesd_dist.errors import ConfigError
from serve_app.batch.disk import writing
from serve_app.batch.job import BatchReport


def show_preview(report: BatchReport) -> None:
    """Prints what a dry run has seen."""
    preview = report.preview
    assert preview is not None
    echo(
        f"{report.num_rows} rows: {report.num_skipped} done before, {preview.num_rows} to run, "
        f"with up to {preview.max_tokens} tokens"
    )
    if preview.num_invalid:
        echo(f"{preview.num_invalid} of them cannot be run:")
        for problem in preview.problems:
            echo(f"  {problem}")
    if preview.unused_columns:
        echo(f"columns that are not used: {', '.join(preview.unused_columns)}")


def show_report(report: BatchReport) -> None:
    """Prints what a run has done."""
    num_tokens = report.throughput.num_tokens
    echo(
        f"{report.num_rows} rows: {report.num_skipped} done before, {report.num_completed} "
        f"answered, {report.num_failed} failed; {num_tokens} tokens"
    )
    if report.num_failed_before:
        echo(
            f"{report.num_failed_before} of those done before had failed: correct their rows, or "
            "use --retry-errors"
        )
    if report.num_failed or report.num_failed_before:
        echo(f"failed rows and their errors: {report.errors_path}")
    if report.num_completed:
        echo(", ".join(_figures(report)))


def _figures(report: BatchReport) -> Iterator[str]:
    throughput, usage = report.throughput, report.usage
    yield f"{throughput.seconds:.1f} s, {throughput.start_s:.1f} s of them before the first token"
    yield f"{throughput.tokens_per_s:.1f} tokens/s"
    if throughput.acceptance is not None:
        yield f"{throughput.acceptance:.2f} of the drafts accepted"
    if throughput.acceptance is not None and usage.rounds.speed_up is not None:
        yield f"{usage.rounds.speed_up:.2f} x rounds without drafts"
    if usage.gpu_s:
        yield f"{usage.gpu_s / 3600:.3f} GPU hours"
    elif usage.core_s:
        yield f"{usage.core_s / 3600:.3f} core hours"


def require_room_for(file: Path) -> None:
    """Raises ConfigError if there is no folder for a file of figures."""
    if not file.parent.is_dir():
        raise ConfigError(f"--report {file}: found no folder {file.parent}, make it first")


def write_report(file: Path, report: BatchReport) -> None:
    """Writes the figures of a run as JSON. Raises ConfigError where it cannot."""
    with writing(file):
        file.write_text(json.dumps(as_json(report)) + "\n")


def as_json(report: BatchReport) -> Mapping[str, Any]:
    """Returns the figures: times in seconds, rates in tokens per second."""
    throughput, usage = report.throughput, report.usage
    timeline = throughput.timeline
    return {
        "num_rows": report.num_rows,
        "num_skipped": report.num_skipped,
        "num_completed": report.num_completed,
        "num_failed": report.num_failed,
        "num_prompt_tokens": throughput.num_prompt_tokens,
        "num_tokens": throughput.num_tokens,
        "seconds": round(throughput.seconds, 3),
        "seconds_before_the_first_token": throughput.start_s,
        "tokens_per_s": round(throughput.tokens_per_s, 2),
        "tail_over_peak": timeline.tail_over_peak(),
        "accepted_over_drafted": throughput.acceptance,
        "speed_up_over_plain_rounds": usage.rounds.speed_up,
        "core_hours": usage.core_s / 3600,
        "gpu_hours": usage.gpu_s / 3600,
        "seconds_per_bin": timeline.bin_s,
        "rows_by_bin": timeline.num_rows,
        "tokens_per_s_by_bin": [round(rate, 1) for rate in timeline.rates()],
    }
