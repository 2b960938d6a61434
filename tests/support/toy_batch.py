"""A batch in a separate process, so that a test can kill it: toy engine, toy tokenizer.

python -m tests.support.toy_batch IN.jsonl OUT.jsonl DELAY_S
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from serve_app.batch.job import BatchOptions, BatchReport, ServedModel, run_batch
from serve_app.batch.local_client import answered_by
from serve_app.batch.loop import RowLoop
from serve_app.openai.text_service import TextService
from tests.support.toy_api import toy_preparation
from tests.support.toy_engine import ToyEngine

MODEL = ServedModel(name="toy", identity={"model_digest": "v1"})


def run(
    input_file: Path,
    output_file: Path,
    *,
    engine: ToyEngine | None = None,
    model: ServedModel = MODEL,
    options: BatchOptions | None = None,
    concurrency: int = 4,
) -> BatchReport:
    preparation = toy_preparation(model_name=model.name, max_model_len=200)
    service = TextService(engine or ToyEngine(vocab_size=128), preparation)

    @asynccontextmanager
    async def execution(options: BatchOptions, num_rows: int) -> AsyncIterator[RowLoop]:
        bodies = options.bodies(model)
        yield RowLoop(answered_by(service), concurrency=concurrency, body_of=bodies)

    return asyncio.run(
        run_batch(
            str(input_file),
            str(output_file),
            execution=execution,
            model=model,
            options=options or BatchOptions(show_progress=False),
        )
    )


if __name__ == "__main__":
    run(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        engine=ToyEngine(vocab_size=128, delay_s=float(sys.argv[3])),
    )
