"""Ray handles of actors that run in this event loop, with the faults of a network."""

import asyncio
from collections.abc import Callable, Generator
from enum import Enum
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError

from eesd_dist.config import EngineConfig
from eesd_dist.workers.drafting_actor import DraftActor
from eesd_dist.workers.messages import Address, Epoch, TelemetryOptions
from eesd_dist.workers.roles import StageFactory
from tests.support.toy_stages import ToyStages


class Fault(Enum):
    """What may happen to a call."""

    UNREACHED = "it does not reach the actor"
    REPLY_LOST = "it runs, and its reply is lost"
    SILENT = "it has no answer"


class ToyHandle:
    """A handle of an object in this process. As with Ray, giving up a call does not end it."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.fault: Callable[[str], Fault | None] = lambda method: None
        """Called with the method of each call."""
        self.calls: list[str] = []
        self._death = asyncio.Event()

    def __getattr__(self, method: str) -> "_Method":
        if method.startswith("__"):
            raise AttributeError(method)
        return _Method(self, method)

    def die(self) -> None:
        """Ends the process, for its callers."""
        self._death.set()

    async def call(self, method: str, arguments: tuple[object, ...]) -> object:
        self.calls.append(method)
        fault = self.fault(method)
        if self._death.is_set():
            raise ActorDiedError
        if fault is Fault.UNREACHED:
            raise ActorUnavailableError("no link", b"0" * 16)
        if fault is Fault.SILENT:
            await asyncio.Event().wait()
        running = asyncio.ensure_future(getattr(self.actor, method)(*arguments))
        dying = asyncio.ensure_future(self._death.wait())
        await asyncio.wait({running, dying}, return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            running.cancel()
            raise ActorDiedError
        dying.cancel()
        answer: object = running.result()
        if fault is Fault.REPLY_LOST:
            raise ActorUnavailableError("no link", b"0" * 16)
        return answer


class _Method:
    def __init__(self, handle: ToyHandle, name: str) -> None:
        self._handle = handle
        self._name = name

    def remote(self, *arguments: object) -> "_Call":
        return _Call(asyncio.ensure_future(self._handle.call(self._name, arguments)))


class _Call:
    """What `remote` returns; it need not be awaited."""

    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def __await__(self) -> Generator[Any, None, object]:
        return asyncio.shield(self._task).__await__()


def epoch(number: int) -> Epoch:
    store = Address(host="nowhere", port=1)
    return Epoch(number=number, store=store, num_verify_ranks=1, timeout_s=1.0, num_pages=8)


async def joined_actor(
    config: EngineConfig, *, name: str = "p", stages: StageFactory | None = None
) -> DraftActor:
    """Returns a drafting actor in its first epoch."""
    actor = DraftActor(
        config,
        name=name,
        stages=stages or ToyStages(),
        telemetry=TelemetryOptions(model_name="toy"),
    )
    await actor.join(epoch(1))
    return actor
