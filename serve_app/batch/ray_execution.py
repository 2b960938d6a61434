"""Runs the rows of a batch with Ray Data: engines in actors, on this machine or on a cluster.

This process reads rows and writes results. What travels through Ray Data are the numbers of
batches, and results; the rows of batches that are not done are in an actor (`RowFeed`).
"""

import asyncio
import logging
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import ray
from ray.data import DataContext, Dataset
from ray.exceptions import RayError

from cluster.ray_compat import stop_of
from eesd_dist.errors import EngineError
from serve_app.batch.feed import RowFeed, batch_sizes
from serve_app.batch.loop import BodyOf, TakeResult
from serve_app.batch.processor import ProcessorConfig, on_this_node, staged
from serve_app.batch.rows import Row
from serve_app.batch.stage import COLUMN, NUMBER, AnswerBatches, Source
from serve_app.service.connect import our_error

_MAX_DEATHS_IN_A_ROW = 3
"""Engines that may die while they load, one after the other."""
_STOP_S = 0.2
_MAX_BATCHES = 4096
"""Batches of a job: Ray Data keeps something of each until the end."""
_BATCHES_AHEAD = 2
"""Batches that wait for each one that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayExecution:
    """Runs rows on the Ray that this process is connected to."""

    source: Source
    config: ProcessorConfig
    body_of: BodyOf
    resources: Mapping[str, float]
    num_rows: int

    async def run(self, rows: Iterator[Row], take: TakeResult) -> None:
        """Raises EngineError when the job cannot go on, and what `take` and `rows` raise."""
        batch_size = max(self.config.batch_size, math.ceil(self.num_rows / _MAX_BATCHES))
        sizes = batch_sizes(self.num_rows, batch_size=batch_size, num_slots=self._num_slots)
        feed = on_this_node(RowFeed, max_concurrency=10_000)
        answers = self._answers(feed, len(sizes))
        stop = stop_of(answers)
        room = asyncio.Semaphore((1 + _BATCHES_AHEAD) * self._num_slots)
        blocks: Blocks = asyncio.Queue()
        reading = asyncio.ensure_future(_read(answers, blocks))
        feeding = asyncio.ensure_future(_feed(feed, rows, sizes, room, blocks))
        pending = set(range(len(sizes)))
        try:
            while (block := await blocks.get()) is not None:
                if isinstance(block, Exception):
                    raise block
                for number, content in zip(block[NUMBER].tolist(), block[COLUMN], strict=True):
                    if number in pending:
                        pending.remove(number)
                        for result in pickle.loads(content):
                            take(result)
                        await feed.forget.remote([number])
                        room.release()
        except RayError as error:
            raise our_error(error) from error
        finally:
            feeding.cancel()
            while not reading.done():
                await asyncio.to_thread(stop)
                await asyncio.wait([reading], timeout=_STOP_S)

    @property
    def _num_slots(self) -> int:
        """Number of batches that run at the same time."""
        sizes = self.config.concurrency
        num_engines = sizes if isinstance(sizes, int) else sizes[1]
        return num_engines * self.config.max_concurrent_batches

    def _answers(self, feed: Any, num_batches: int) -> Dataset:
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.max_consecutive_actor_init_deaths = _MAX_DEATHS_IN_A_ROW
        context.execution_no_progress_timeout_s = -1  # a batch of a slow engine may take an hour
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        numbers = ray.data.range(num_batches, override_num_blocks=num_batches)
        config = self.config.model_copy(update={"batch_size": 1})  # of numbers
        return staged(
            numbers,
            AnswerBatches,
            (feed,),
            config,
            source=self.source,
            body_of=self.body_of,
            resources=self.resources,
        )


Blocks = asyncio.Queue[Mapping[str, Any] | Exception | None]
"""Blocks with results, the error that ends them, or their end."""


async def _read(answers: Dataset, blocks: Blocks) -> None:
    """Reads a dataset in a thread, for the event loop."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        end: Exception | None = EngineError("Ray Data has ended the job")
        try:
            for block in answers.iter_batches(batch_size=None):
                loop.call_soon_threadsafe(blocks.put_nowait, block)
            end = None
        except Exception as error:  # raised where the blocks are taken
            end = our_error(error)
        finally:
            loop.call_soon_threadsafe(blocks.put_nowait, end)

    await asyncio.to_thread(read)


async def _feed(
    feed: Any, rows: Iterator[Row], sizes: Sequence[int], room: asyncio.Semaphore, blocks: Blocks
) -> None:
    try:
        for size in sizes:
            await room.acquire()
            await feed.put.remote(pickle.dumps(list(islice(rows, size))))
        await feed.close.remote()
    except Exception as error:  # raised where the blocks are taken
        blocks.put_nowait(error)
