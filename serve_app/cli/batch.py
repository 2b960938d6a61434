"""`eesd batch`."""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, echo

from eesd_dist.command_line import given
from eesd_dist.errors import ConfigError
from serve_app.cli.configuration import EngineFlags, config_of


def batch(
    input_file: Annotated[
        Path, Argument(metavar="IN.jsonl", help="OpenAI batch lines, or plain request bodies")
    ],
    output_file: Annotated[
        Path, Argument(metavar="OUT.jsonl", help="continued where an earlier run stopped")
    ],
    engine: EngineFlags,
    url: Annotated[
        str | None,
        "a running service, which gets rows as they are; without it, the engine runs here",
    ] = None,
    concurrency: Annotated[int, "rows in flight"] = 16,
    seed: Annotated[int, "seed of the job; the seed of a row overrides it"] = 0,
    default: Annotated[
        tuple[str, ...], "--default FIELD=VALUE: body field of every row; may be repeated"
    ] = (),
    ordered: Annotated[bool, "write the output in the order of the input"] = False,
    force: Annotated[bool, "continue an output that was made with other settings"] = False,
    quiet: Annotated[bool, "no progress bar"] = False,
) -> int:
    """Runs a file of requests and writes one answer per line."""
    # torch takes seconds to import.
    from serve_app.batch.runner import BatchOptions
    from serve_app.batch.start import run_in_process, run_over_http

    config = config_of(engine)
    options = BatchOptions(
        concurrency=concurrency,
        seed=seed,
        defaults=defaults_of(default),
        ordered=ordered,
        force=force,
        show_progress=not quiet,
    )
    files = (input_file, output_file)
    if url is None:
        run = run_in_process(*files, config=config, options=options)
    else:
        _check_that_none_is_ignored(engine)
        key = os.environ.get(config.api_key_env) or None
        run = run_over_http(*files, url=url, api_key=key, options=options)
    report = asyncio.run(run)
    echo(
        f"{report.num_rows} rows: {report.num_skipped} done before, {report.num_completed} "
        f"answered, {report.num_failed} failed; {report.num_tokens} tokens"
    )
    if report.num_failed_before:
        echo(f"{report.num_failed_before} of those done before had failed: correct their rows")
    return 1 if report.num_failed or report.num_failed_before else 0


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
