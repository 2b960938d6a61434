"""What chaos has cut and stopped is mended, whatever fails on the way."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from eesd_dist.errors import EngineError
from serve_app.bench.chaos import run
from serve_app.bench.chaos.reach import SignalsByCommand
from serve_app.bench.chaos.run import FaultInjector, LinkCommands, ServiceUnderTest


class NoService(ServiceUnderTest):
    def __init__(self) -> None:
        """Nothing is running."""


def injector() -> FaultInjector:
    return FaultInjector(NoService(), signals=SignalsByCommand("true"), links=None, patience_s=1.0)


async def run_without_faults(
    faults: FaultInjector, *afterwards: Callable[[], Awaitable[None]]
) -> None:
    faults._afterwards.extend(asyncio.ensure_future(action()) for action in afterwards)
    await faults.run(iter(()), until=asyncio.Event(), say=lambda _: None)


def test_one_mending_that_fails_spoils_neither_another_nor_the_report(tmp_path: Path) -> None:
    async def fails() -> None:
        raise EngineError("no such host")

    async def mends() -> None:
        await asyncio.sleep(0.05)
        (tmp_path / "mended").touch()

    faults = injector()
    asyncio.run(run_without_faults(faults, fails, mends))
    assert faults.injected.missed == ["mending: no such host"]
    assert (tmp_path / "mended").exists()


def test_a_link_is_mended_although_the_first_attempt_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_MENDING_PAUSE_S", 0.0)
    first, second = tmp_path / "first", tmp_path / "second"
    up = f"sh -c 'test -e {first} && touch {second} || {{{{ touch {first}; exit 1; }}}}'"
    links = LinkCommands(down="true", up=up, cut_s=0.0)
    faults = injector()
    asyncio.run(run_without_faults(faults, lambda: run._mend_later(links, "h")))
    assert faults.injected.missed == []
    assert second.exists()


class ReadyService(NoService):
    """It is ready, whatever was done to it."""

    async def is_ready(self) -> bool:
        return True


@pytest.mark.parametrize("num_open", [0, 2])
def test_a_fault_that_was_not_noticed_is_told_by_its_own_number(num_open: int) -> None:
    faults = FaultInjector(
        ReadyService(), signals=SignalsByCommand("true"), links=None, patience_s=-1.0
    )

    async def says(answer: bool) -> bool:
        return answer

    async def run() -> bool:
        faults._open = [(7, lambda: says(False)), (8, lambda: says(True))][:num_open]
        return await faults._wait_until_mended(asyncio.Event())

    assert asyncio.run(run())
    assert faults.injected.unnoticed == [7][:num_open]
