"""Keeps strangers out of a listening socket that a library opens: in the kernel where this user may
attach packet filters, otherwise by when the library accepts."""

import logging
import os
from collections.abc import Iterable
from functools import cache
from typing import Protocol

from eesd_dist.transport.authentication.accept_switch import AcceptSwitch
from eesd_dist.transport.authentication.connection_filter import ConnectionFilter, filter_denial

logger = logging.getLogger(__name__)


class ListenerGuard(Protocol):
    """A listening socket that admits nothing at first, and nothing any more after `block`."""

    @property
    def address(self) -> tuple[str, int]: ...
    @property
    def num_dropped(self) -> int: ...
    def cut_waiting(self) -> bool: ...
    def admit(self, hosts: Iterable[str]) -> None: ...
    def block(self) -> None: ...
    def release(self) -> None: ...


def guard_listener(handle: int) -> ListenerGuard:
    """Returns the guard of the socket with this file handle, which admits nothing yet."""
    return AcceptSwitch(handle) if _is_denied() else ConnectionFilter(handle)


@cache
def _is_denied() -> bool:
    """Finds out once for this process, and logs why packet filters are not used."""
    denial = filter_denial()
    if denial is not None:
        logger.warning(
            "no packet filters on listening sockets: option=SO_ATTACH_FILTER error=%s uid=%d "
            "instead=%s",
            denial, os.getuid(),
            "sockets are closed when a group is connected, and ranks prove the epoch's secret",
        )  # fmt: skip
    return denial is not None
