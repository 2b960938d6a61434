"""Limits of API keys over all ingresses: requests at the same time, and tokens per minute.

The router holds one book for all ingresses, and each ingress one of its own, which holds while the
router is silent. Pure: times are passed in.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from eesd_dist.types import Value

_MINUTE_S = 60.0
BUSY_RETRY_S = 1.0
"""When to try again where too many requests are being answered, of which any may end next."""

Refusal = Literal["concurrency", "tokens"]


class Quota(Value, frozen=True, kw_only=True):
    """What one caller may use. None: no limit."""

    max_concurrent: int | None = None
    tokens_per_minute: int | None = None


class Standing(Value, frozen=True, kw_only=True):
    """How a caller stands after it has asked to be served."""

    refused: Refusal | None = None
    num_running: int = 0
    """Requests that are answered now, this one included if it is not refused."""
    num_tokens_left: int = 0
    """Until the limit, not below 0."""
    wait_s: float = 0.0
    """Until all tokens of a minute are there again; of a refused request, until it may be tried
    again."""


@dataclass(slots=True)
class _Account:
    """What one caller uses."""

    num_owed: float = 0.0
    """Tokens used and not yet forgotten; above the limit where answers took more than was left."""
    at_s: float = 0.0
    held: dict[str, dict[str, None]] = field(default_factory=dict)
    """Permits in use, by ingress."""

    @property
    def num_running(self) -> int:
        return sum(map(len, self.held.values()))

    def forget(self, rate: float, now_s: float) -> None:
        elapsed_s = max(0.0, now_s - self.at_s)
        self.num_owed = max(0.0, self.num_owed - elapsed_s * rate)
        self.at_s = now_s


class QuotaBook:
    """The accounts of callers. An ingress that is not heard of for `expiry_s` holds nothing."""

    def __init__(self, *, expiry_s: float) -> None:
        self._expiry_s = expiry_s
        self._accounts: dict[str, _Account] = {}
        self._heard_s: dict[str, float] = {}
        """By ingress."""

    def acquire(
        self, caller: str, quota: Quota, *, permit: str, ingress: str, now_s: float
    ) -> Standing:
        """Gives a permit for one request, or refuses it."""
        self._hear(ingress, now_s)
        account = self._accounts.setdefault(caller, _Account(at_s=now_s))
        account.held.get(ingress, {}).pop(permit, None)  # told of before it was asked for
        refused: Refusal | None = None
        num_left, wait_s = 0, 0.0
        if quota.max_concurrent is not None and account.num_running >= quota.max_concurrent:
            refused, wait_s = "concurrency", BUSY_RETRY_S
        if quota.tokens_per_minute is not None:
            rate = quota.tokens_per_minute / _MINUTE_S
            account.forget(rate, now_s)
            left = quota.tokens_per_minute - account.num_owed
            if left < 1:
                refused, wait_s = "tokens", (1 - left) / rate
            elif refused is None:
                wait_s = account.num_owed / rate
            num_left = max(0, int(left))
        if refused is None and quota.max_concurrent is not None:
            account.held.setdefault(ingress, {})[permit] = None
        return Standing(
            refused=refused,
            num_running=account.num_running,
            num_tokens_left=num_left,
            wait_s=wait_s,
        )

    def release(
        self, caller: str, *, permit: str, ingress: str, num_tokens: int, now_s: float
    ) -> None:
        """Takes a permit back, and notes what its request has used."""
        account = self._accounts.setdefault(caller, _Account(at_s=now_s))
        account.held.get(ingress, {}).pop(permit, None)
        account.num_owed += num_tokens

    def hold(self, ingress: str, held: Mapping[str, Collection[str]], *, now_s: float) -> None:
        """Notes all permits that an ingress has given out, by caller, in place of those known: a
        book that was lost learns them again, and what was not returned is forgotten."""
        self._hear(ingress, now_s)
        for account in self._accounts.values():
            account.held.pop(ingress, None)
        for caller, permits in held.items():
            account = self._accounts.setdefault(caller, _Account(at_s=now_s))
            account.held[ingress] = dict.fromkeys(permits)

    def held_by(self, ingress: str) -> dict[str, tuple[str, ...]]:
        """Returns the permits that this ingress has given out, by caller."""
        found = {
            caller: tuple(account.held.get(ingress, ()))
            for caller, account in self._accounts.items()
        }
        return {caller: permits for caller, permits in found.items() if permits}

    def _hear(self, ingress: str, now_s: float) -> None:
        self._heard_s[ingress] = now_s
        silent = {one for one, at_s in self._heard_s.items() if now_s - at_s > self._expiry_s}
        for each in silent:
            del self._heard_s[each]
            for account in self._accounts.values():
                account.held.pop(each, None)
