"""Measures memory and scan time of `eesd batch` with many rows, answered by an engine that echoes.

    python infra/batch_scale.py FOLDER RECORD.json [--rows 1000000] [--parquet-bytes 5000000000]
    python infra/batch_scale.py FOLDER RECORD.json --real

First JSON lines with ids of their own, then Parquet with long prompts and without ids. Each job is
killed (SIGKILL) when half of it is done, and continued; then it is started once more, with nothing
left to do: its time is that of the scan. With `--real` the bundled model answers 5,000 rows of many
lengths instead.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from eesd_dist.provenance import collect_provenance

_ROWS_PER_GROUP = 2000
_PROMPT_BYTES = 50_000
_NUM_REAL_ROWS = 5000


def echo(folder: Path, *, num_rows: int, num_bytes: int) -> Mapping[str, Any]:
    """Returns the figures of the jobs over an engine that echoes, and prints a line for each."""
    lines, table = folder / "rows.jsonl", folder / "rows.parquet"
    _write_lines(lines, num_rows)
    num_long_rows = _write_table(table, num_bytes)
    content: dict[str, Any] = {"what": "eesd batch over an engine that echoes, on Ray"}
    for name, rows, number in (("jsonl", lines, num_rows), ("parquet", table, num_long_rows)):
        output = folder / f"{name}.parquet"
        half = _job(rows, output, until_rows=number // 2)
        continued = _job(rows, output)
        scan = _job(rows, output)
        ids = _ids(output)
        content[name] = {
            "num_rows": number,
            "input_bytes": rows.stat().st_size,
            "num_results": len(ids),
            "num_lost": number - len(set(ids)),
            "num_repeated": len(ids) - len(set(ids)),
            "killed_at_half": half,
            "continued": continued,
            "started_again": scan,
            "scan_over_run": scan["seconds"] / (half["seconds"] + continued["seconds"]),
        }
        print(name, content[name], flush=True)
    return content


def real(folder: Path) -> Mapping[str, Any]:
    """Answers rows of many lengths with the bundled model; returns the report of the job."""
    rng = random.Random(0)
    rows, report = folder / "real.jsonl", folder / "real.json"
    with rows.open("w") as lines:
        for number in range(_NUM_REAL_ROWS):
            a, b = rng.randrange(2, 90), rng.randrange(2, 90)
            prompt = f"{number}. Tom has {a} apples and buys {b} more. How many does he have?"
            row = {"messages": [{"role": "user", "content": prompt}]}
            lines.write(json.dumps({**row, "max_tokens": rng.choice([16, 48, 96, 192])}) + "\n")
    command = [sys.executable, "-m", "serve_app.cli.main", "batch", str(rows)]
    command += [str(folder / "real.out.jsonl"), "--quiet", "--report", str(report)]
    subprocess.run(command, check=True)
    content: Mapping[str, Any] = json.loads(report.read_text())
    return content


def _write_lines(file: Path, number: int) -> None:
    with file.open("w") as lines:
        for n in range(number):
            row = {
                "id": f"row-{n}",
                "prompt": f"a prompt of some words, number {n}",
                "max_tokens": 16,
            }
            lines.write(json.dumps(row) + "\n")


def _write_table(file: Path, num_bytes: int) -> int:
    rng = random.Random(0)
    schema = pa.schema([("prompt", pa.string())])
    number = num_bytes // _PROMPT_BYTES
    with pq.ParquetWriter(file, schema, compression="none", use_dictionary=False) as writer:
        for first in range(0, number, _ROWS_PER_GROUP):
            prompts = [
                rng.randbytes(_PROMPT_BYTES // 2).hex()
                for _ in range(min(_ROWS_PER_GROUP, number - first))
            ]
            writer.write_table(pa.table({"prompt": prompts}, schema=schema))
    return number


def _job(rows: Path, output: Path, *, until_rows: int | None = None) -> Mapping[str, Any]:
    """Runs a job to its end, or kills it when so many rows are done. Returns its seconds and the
    memory of the process that reads and writes, by tenths of its time."""
    command = [sys.executable, __file__, "--job", str(rows), str(output)]
    began_s = time.perf_counter()
    mebibytes: list[int] = []
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            time.sleep(0.25)
            try:
                mebibytes.append(psutil.Process(process.pid).memory_info().rss >> 20)
            except psutil.NoSuchProcess:
                break
            if until_rows is not None and len(mebibytes) % 20 == 0 and _count(output) >= until_rows:
                process.send_signal(signal.SIGKILL)
    assert until_rows is not None or process.returncode == 0, process.returncode
    tenth = max(1, len(mebibytes) // 10)
    return {
        "seconds": round(time.perf_counter() - began_s, 1),
        "mebibytes": [max(mebibytes[at : at + tenth]) for at in range(0, len(mebibytes), tenth)],
    }


def _count(output: Path) -> int:
    return sum(pq.read_metadata(file).num_rows for file in output.glob("part-*.parquet"))


def _ids(output: Path) -> list[str]:
    ids: list[str] = []
    for file in output.glob("part-*.parquet"):
        ids += pq.read_table(file, columns=["custom_id"]).column(0).to_pylist()
    return ids


@dataclass(frozen=True, slots=True)
class EchoSource:
    """Describes an engine that answers with the beginning of the prompt."""

    def build(self) -> "EchoAnswering":
        return EchoAnswering()


class EchoAnswering:
    is_broken = False
    max_attempts = 1
    max_rows = 1024
    patience_s = 60.0

    async def open(self) -> Any:
        async def answer(kind: str, body: Mapping[str, object]) -> bytes:
            text = str(body["prompt"])[-64:]
            usage = {"prompt_tokens": 16, "completion_tokens": 16}
            choices = [{"index": 0, "text": text, "finish_reason": "length"}]
            return json.dumps({"id": "cmpl-x", "choices": choices, "usage": usage}).encode()

        return answer

    def waiting_for(self) -> str:
        return ""

    def close(self) -> Any:
        from serve_app.batch.usage import Usage

        return Usage()


def run_job(rows: str, output: str) -> None:
    """Runs the job over the echo, on a Ray of its own."""
    from serve_app.service.environment import prepare_for_local_ray

    prepare_for_local_ray()
    from serve_app.batch.engine_pool import EnginePool
    from serve_app.batch.job import BatchOptions, ServedModel, run_batch
    from serve_app.cli.configuration import EngineFlags, config_of
    from serve_app.service.local_ray import local_ray, without_core_messages

    model = ServedModel(name="echo", identity={})

    @asynccontextmanager
    async def execution(options: BatchOptions, num_rows: int) -> Any:
        with without_core_messages(), local_ray(config_of(EngineFlags()), shows_logs=False):
            yield EnginePool(
                source=EchoSource(),
                body_of=options.bodies(model),
                num_engines=2,
                resources={},
                concurrency=64,
                num_rows=num_rows,
            )

    options = BatchOptions(show_progress=False)
    asyncio.run(run_batch(rows, output, execution=execution, model=model, options=options))


if __name__ == "__main__":
    if sys.argv[1] == "--job":
        run_job(*sys.argv[2:])
        os._exit(0)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("record", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--parquet-bytes", type=int, default=5_000_000_000)
    parser.add_argument("--real", action="store_true")
    arguments = parser.parse_args()
    content = (
        real(arguments.folder)
        if arguments.real
        else echo(arguments.folder, num_rows=arguments.rows, num_bytes=arguments.parquet_bytes)
    )
    content = {**content, "provenance": asdict(collect_provenance())}
    arguments.record.write_text(json.dumps(content, indent=1, default=str) + "\n")
