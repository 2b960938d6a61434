"""`eesd batch`."""

import asyncio
import json
import os
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument

from eesd_dist.checks import require_extra
from eesd_dist.command_line import given
from eesd_dist.errors import ConfigError
from serve_app.cli.configuration import EngineFlags, config_of

if TYPE_CHECKING:
    from serve_app.batch.job import BatchReport

_INTERRUPTED = 130


def batch(
    input_file: Annotated[
        str,
        Argument(
            metavar="INPUT",
            help="JSON lines (OpenAI's batch lines, or plain bodies), CSV or Parquet, also in gzip "
            "or zstd: a file, a folder, a glob, a URI, or - for standard input",
        ),
    ],
    output_file: Annotated[
        str,
        Argument(
            metavar="OUTPUT",
            help="a .jsonl file, or a folder of parts (a URI, NAME.parquet, NAME/); continued "
            "where an earlier run stopped",
        ),
    ],
    engine: EngineFlags,
    url: Annotated[
        str | None,
        "a running service, which gets rows as they are; without it, engines run here",
    ] = None,
    address: Annotated[
        str | None, "Ray cluster to run engines on; else Ray is started here"
    ] = None,
    in_process: Annotated[bool, "one engine in this process, without Ray"] = False,
    engines: Annotated[int | None, "number of engines (one for each GPU, or each node)"] = None,
    concurrency: Annotated[int, "rows in flight in each engine"] = 64,
    seed: Annotated[int, "seed of the job; the seed of a row overrides it"] = 0,
    default: Annotated[
        tuple[str, ...], "--default FIELD=VALUE: body field of every row; may be repeated"
    ] = (),
    override_model: Annotated[bool, "answer rows whatever model they name"] = False,
    format: Annotated[Literal["jsonl", "parquet"] | None, "of the output (as its name says)"] = (
        None
    ),
    ordered: Annotated[bool, "write the output in the order of the input"] = False,
    retry_errors: Annotated[bool, "run rows again that were refused as invalid"] = False,
    max_errors: Annotated[int | None, "stop after more failed rows than this"] = None,
    force: Annotated[bool, "continue an output that was made with other settings"] = False,
    dry_run: Annotated[bool, "say what would be run, and change nothing"] = False,
    report: Annotated[Path | None, "file for the figures of the run, as JSON"] = None,
    quiet: Annotated[bool, "no progress"] = False,
) -> int:
    """Runs a file of requests and writes one answer for each.

    Rows that failed are in a file of errors next to the output. Exit status 0: all rows are
    answered; 1: some have failed, or the job could not go on; 2: wrong files or options; 130:
    stopped by a signal, to be continued by the same command.
    """
    require_extra("batch", "pandas", "pyarrow", what="eesd batch")
    # torch takes seconds to import.
    from serve_app.batch.job import BatchOptions
    from serve_app.batch.plan import RayPlan
    from serve_app.batch.records import Recovery
    from serve_app.batch.report import (
        require_room_for,
        show_preview,
        show_report,
        write_report,
    )
    from serve_app.batch.start import run_in_process, run_over_http, run_with_ray

    if report is not None:
        require_room_for(report)
    _check_numbers(concurrency=concurrency, engines=engines, max_errors=max_errors)
    if sum([url is not None, address is not None, in_process]) > 1:
        raise ConfigError("found two of --url, --address and --in-process, expected one at most")
    if engines is not None and (in_process or url is not None):
        raise ConfigError("--engines: found together with --url or --in-process, where none start")
    config = config_of(engine)
    options = BatchOptions(
        seed=seed,
        defaults=defaults_of(default),
        override_model=override_model,
        format=format,
        ordered=ordered,
        recovery=Recovery(retry_errors=retry_errors, force=force, dry_run=dry_run),
        max_errors=max_errors,
        show_progress=not quiet,
    )
    words = (input_file, output_file)
    if url is None and in_process:
        run = run_in_process(*words, config=config, options=options, concurrency=concurrency)
    elif url is None:
        plan = RayPlan(address=address, engines=engines, concurrency=concurrency)
        run = run_with_ray(*words, config=config, options=options, plan=plan)
    else:
        _check_that_none_is_ignored(engine)
        key = os.environ.get(config.api_key_env) or None
        run = run_over_http(*words, url=url, api_key=key, options=options, concurrency=concurrency)
    try:
        done = asyncio.run(_until_stopped(run))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write("eesd: stopped; finished rows are kept: the same command continues\n")
        return _INTERRUPTED
    if done.preview is not None:
        show_preview(done)
        return 0
    show_report(done)
    if report is not None:
        write_report(report, done)
    return 1 if done.num_failed or done.num_failed_before else 0


def _check_numbers(*, concurrency: int, engines: int | None, max_errors: int | None) -> None:
    if concurrency < 1:
        raise ConfigError(f"--concurrency {concurrency}: expected 1 or more, nothing would be run")
    if engines is not None and engines < 1:
        raise ConfigError(f"--engines {engines}: expected 1 or more, nothing would be run")
    if max_errors is not None and max_errors < 0:
        raise ConfigError(f"--max-errors {max_errors}: expected 0 or more")


async def _until_stopped(run: Coroutine[Any, Any, "BatchReport"]) -> "BatchReport":
    from serve_app.batch.signals import interrupt_at_signals

    interrupt_at_signals()
    return await run


def _check_that_none_is_ignored(engine: EngineFlags) -> None:
    ignored = sorted(given(engine).keys() - {"config", "set"})
    if ignored:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
        raise ConfigError(
            f"{names}: found together with --url, where the service's own configuration applies: "
            "leave it out"
        )


def defaults_of(words: Sequence[str]) -> dict[str, object]:
    """The fields of --default; values that JSON cannot express are refused with ConfigError."""
    from serve_app.service.settings import parse_setting

    defaults: dict[str, object] = {}
    for word in words:
        name, value = parse_setting("--default", word, form="FIELD=VALUE")
        try:
            survives = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            survives = False
        if not survives:
            raise ConfigError(
                f"--default {word}: found {value!r}, which JSON has no form for: put dates, and "
                "the keys of a mapping, into additional quotes"
            )
        defaults[name] = value
    return defaults
