"""Calls to every replica of the pipelines, over Serve; for everything but the streams."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any

import ray
from ray.serve.exceptions import RayServeException

from eesd_dist.errors import PROCESS_DIED, EesdError, EngineError, PeerLost
from eesd_dist.workers.process import PROCESS_LOST


async def of_all(
    pipelines: Any, method: str, *args: object, timeout_s: float, grace_s: float | None = None
) -> tuple[Any, ...]:
    """Calls a method of every replica. Returns the answers that come in time; after the first one
    the others have `grace_s`. Raises EngineError if there is none."""
    deadline_s = time.monotonic() + timeout_s
    try:
        calls = await _called(pipelines, method, *args, timeout_s=timeout_s)
        answers = await answered(calls, timeout_s=deadline_s - time.monotonic(), grace_s=grace_s)
    except TimeoutError as error:
        raise EngineError(f"no pipeline has answered within {timeout_s:g} s") from error
    except (ray.exceptions.RayError, RayServeException) as error:
        raise _ours(error) from error
    good = tuple(answer for answer in answers if not isinstance(answer, Exception))
    if not good:
        raise EngineError(
            f"no pipeline answers: {answers[0]}" if answers else "no pipeline is running"
        )
    return good


async def of_named(pipelines: Any, method: str, name: str, *, timeout_s: float) -> Any:
    """Calls a method of every replica with the name of a pipeline. Returns the answer of that
    pipeline, None if there is none (the others answer None), or raises its error."""
    failed: Exception | None = None
    try:
        async with asyncio.timeout(timeout_s):
            for call in asyncio.as_completed(await _called(pipelines, method, name)):
                try:
                    if (answer := await call) is not None:
                        return answer
                except (EesdError, ray.exceptions.RayError, RayServeException) as error:
                    failed = error
    except TimeoutError as error:
        raise EngineError(f"{name} has not answered within {timeout_s:g} s") from error
    if failed is not None:
        raise _ours(failed)
    return None


async def _called(
    pipelines: Any, method: str, *arguments: object, timeout_s: float | None = None
) -> list[Awaitable[Any]]:
    """Returns the calls; Ray's `results_async` has one deadline for all answers."""
    broadcast = pipelines.broadcast(method, *arguments)
    async with asyncio.timeout(timeout_s):
        return [call.get_async() for call in await broadcast._fetch_replica_results_async()]


async def answered(
    calls: Sequence[Awaitable[Any]], *, timeout_s: float, grace_s: float | None = None
) -> tuple[Any, ...]:
    """Returns what the calls answer in time, exceptions included.

    After the first answer the other calls have `grace_s`; None: all the time left. Raises
    TimeoutError if there is none.
    """
    loop = asyncio.get_running_loop()
    tasks = [asyncio.ensure_future(call) for call in calls]
    silent = set(tasks)
    deadline_s = loop.time() + timeout_s
    try:
        while silent and (left_s := deadline_s - loop.time()) > 0:
            done, silent = await asyncio.wait(
                silent, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            if grace_s is not None and any(map(_has_answer, done)):
                deadline_s = min(deadline_s, loop.time() + grace_s)
    finally:
        for task in silent:
            task.cancel()
    if tasks and len(silent) == len(tasks):
        raise TimeoutError
    ended = [task for task in tasks if task not in silent and not task.cancelled()]
    return tuple(task.exception() or task.result() for task in ended)


def _has_answer(task: asyncio.Future[Any]) -> bool:
    return not task.cancelled() and task.exception() is None


def _ours(error: Exception) -> EesdError:
    if isinstance(error, PROCESS_LOST):
        return PeerLost(peer="pipeline replica", operation="call", reason=PROCESS_DIED)
    cause = getattr(error, "cause", None)
    return (
        cause if isinstance(cause, EesdError) else EngineError(f"{type(error).__name__}: {error}")
    )
