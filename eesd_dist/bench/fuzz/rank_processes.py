"""Processes of this machine that run the actors of ranks without Ray, one engine after the other.

They are forked from one server that has imported what a rank needs, so that a killed one is
replaced in a fraction of a second. They end with this process.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from eesd_dist.config import EngineConfig
from eesd_dist.errors import PROCESS_DIED, EesdError, EngineError, PeerLost
from eesd_dist.workers.messages import StageName, TelemetryOptions

_forked = multiprocessing.get_context("forkserver")
_IMPORTED = [
    f"eesd_dist.workers.{name}" for name in ("rank_actor", "verify_worker", "draft_follower")
]


class RankProcess:
    """A process, and calls to the actor in it, one after the other. From any thread."""

    def __init__(self) -> None:
        self._connection, actor_end = _forked.Pipe()
        self._process = _forked.Process(target=_run_actor, args=(actor_end,), daemon=True)
        self._process.start()
        actor_end.close()
        self._calling = threading.Lock()
        self._num_calls = 0

    def call(self, method: str, *args: object, timeout_s: float) -> object:
        """Returns the result of the actor's method. Raises its error, or PeerLost."""
        peer = f"process {self._process.pid}"
        with self._calling:
            self._num_calls += 1
            deadline = time.monotonic() + timeout_s
            try:
                self._connection.send((self._num_calls, method, args))
                number, result = 0, None
                while number != self._num_calls:  # answers to earlier calls may come first
                    if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                        reason = f"no answer within {timeout_s:g} s"
                        raise PeerLost(peer=peer, operation=method, reason=reason)
                    number, result = self._connection.recv()
            except (EOFError, OSError) as error:
                raise PeerLost(peer=peer, operation=method, reason=PROCESS_DIED) from error
        if isinstance(result, BaseException):
            raise result
        return result

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None, "it was started"
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Ends it with SIGKILL, also if it is stopped."""
        self._process.kill()
        self._process.join()
        self._connection.close()


class RankProcesses:
    """Processes without a rank, ready for the next engine."""

    def __init__(self) -> None:
        self._free: list[RankProcess] = []

    def take(self) -> RankProcess:
        _forked.set_forkserver_preload(_IMPORTED)
        return self._free.pop() if self._free else RankProcess()

    def give_back(self, process: RankProcess) -> None:
        self._free.append(process)

    def close(self) -> None:
        for process in self._free:
            process.kill()
        self._free.clear()


def _run_actor(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of a terminal is for the parent
    asyncio.run(_answer(connection))


async def _answer(connection: Connection) -> None:
    """Answers calls until the parent has ended."""
    actor: object = None
    while True:
        try:
            number, method, args = await asyncio.to_thread(connection.recv)
        except EOFError:
            os._exit(0)
        result: object = None
        try:
            if method == "build":
                actor = _build_actor(*args)
            else:
                result = await getattr(actor, method)(*args)
        except EesdError as error:
            result = error
        except Exception as error:  # cannot always be sent
            result = EngineError(f"{method} broke: {type(error).__name__}: {error}")
        connection.send((number, result))


def _build_actor(config: EngineConfig, stage: StageName, rank: int, address: str) -> object:
    """Builds the actor of a rank that its peers reach at this address."""
    from eesd_dist.workers.process import set_log_level
    from eesd_dist.workers.rank_actor import RankActor
    from eesd_dist.workers.stage_factory import EngineStages

    actor = RankActor(
        config,
        name=f"{stage} rank {rank}",
        stage=stage,
        rank=rank,
        stages=EngineStages(address=address, compiles_kernels=False),
        telemetry=TelemetryOptions(model_name="fuzz"),
    )
    set_log_level("ERROR")  # lost peers are part of the test
    return actor
