"""Limits of API keys over all ingresses: requests at the same time, and tokens per minute.

A request gets a permit before its body is read. What it may use is charged as soon as that is
known, before anything is computed, and when it ends the rest is refunded, once. The account is a
bucket that leaks: what is charged is forgotten at the rate of the limit.

Calls may be lost, and may arrive in another order than they were made in: a request is charged once
all the same. The router holds one book for all ingresses, and each ingress one of its own, which
holds while the router is silent. Pure: times are passed in.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from msgspec import structs

from eesd_dist.types import Value

_MINUTE_S = 60.0
_MAX_CLOSED = 4096
"""Permits that are remembered after their end, for calls that arrive late."""
BUSY_RETRY_S = 1.0
"""Seconds until the next try where too many requests are being answered, of which any may end
next."""

Refusal = Literal["concurrency", "tokens"]
Held = Mapping[str, Mapping[str, int]]
"""Permits of callers, and the tokens that are charged for each so far."""


class Quota(Value, frozen=True, kw_only=True):
    """Limits of what one caller may use. None: no limit."""

    max_concurrent: int | None = None
    tokens_per_minute: int | None = None


class Standing(Value, frozen=True, kw_only=True):
    """Standing of a caller after it has asked to be served."""

    refusal: Refusal | None = None
    num_running: int = 0
    """Requests that are answered now, this one included if it is not refused."""
    num_tokens_left: int = 0
    """Number of tokens until the limit, not below 0."""
    wait_s: float = 0.0
    """Seconds until all tokens of a minute are there again; of a refused request, until it may be
    tried again."""


@dataclass(slots=True)
class _Account:
    """Account of what one caller uses."""

    at_s: float
    rate: float = 0.0
    """Tokens that are forgotten in a second; 0 before the limit is known."""
    num_owed: float = 0.0
    """Tokens charged and not yet forgotten; above the limit where requests took more than was
    left."""
    held: dict[str, dict[str, int]] = field(default_factory=dict)
    """Permits in use by ingress, and the tokens that are charged for each so far."""

    @property
    def num_running(self) -> int:
        return sum(map(len, self.held.values()))

    def charge(self, num_tokens: int, *, time_s: float) -> None:
        """Charges tokens; a negative number is a refund."""
        self.forget(time_s)
        self.num_owed = max(0.0, self.num_owed + num_tokens)

    def forget(self, time_s: float) -> None:
        elapsed_s = max(0.0, time_s - self.at_s)
        self.num_owed = max(0.0, self.num_owed - elapsed_s * self.rate)
        self.at_s = time_s


class QuotaBook:
    """The accounts of callers. An ingress that is not heard of for `expiry_s` holds nothing."""

    def __init__(self, *, expiry_s: float) -> None:
        self._expiry_s = expiry_s
        self._accounts: dict[str, _Account] = {}
        self._received_s: dict[str, float] = {}
        """Time when each ingress was last heard of."""
        self._closed: OrderedDict[str, int | None] = OrderedDict()
        """Permits that are not held any more, and what was charged for each: in advance, where its
        end was not heard of; None where it was, and nothing changes any more."""

    def acquire(
        self, caller: str, quota: Quota, *, permit: str, ingress: str, time_s: float
    ) -> Standing:
        """Gives a permit for one request, or refuses it."""
        self._hear(ingress, time_s)
        account = self._account(caller, time_s)
        held = account.held.setdefault(ingress, {})
        charged = held.pop(permit, 0)  # of a permit that the ingress has told of before
        standing = _standing(account, quota, time_s=time_s)
        if standing.refusal is not None:
            account.charge(-charged, time_s=time_s)
            return standing
        if permit not in self._closed:
            held[permit] = charged
        return structs.replace(standing, num_running=account.num_running)

    def reserve(
        self,
        caller: str,
        quota: Quota,
        *,
        permit: str,
        ingress: str,
        num_tokens: int,
        time_s: float,
    ) -> Standing:
        """Charges tokens for a request in advance, in place of those charged for it before; or
        refuses that, if the caller has none left without the request."""
        self._hear(ingress, time_s)
        account = self._account(caller, time_s)
        if self._has_ended(permit):
            return Standing()
        held = account.held.setdefault(ingress, {})
        before = self._charged(permit, held)
        token_quota = structs.replace(quota, max_concurrent=None)
        standing = _standing(account, token_quota, num_own=before, time_s=time_s)
        held[permit] = before if standing.refusal is not None else num_tokens
        account.charge(held[permit] - before, time_s=time_s)
        return standing

    def release(
        self, caller: str, *, permit: str, ingress: str, num_tokens: int, time_s: float
    ) -> None:
        """Takes a permit back, and charges what its request has used in place of what was charged
        in advance."""
        if self._has_ended(permit):
            return
        account = self._account(caller, time_s)
        charged = self._charged(permit, account.held.get(ingress, {}))
        account.charge(num_tokens - charged, time_s=time_s)
        self._close(permit, None)

    def hold(self, ingress: str, held: Held, *, time_s: float) -> None:
        """Notes all permits that an ingress has given out, in place of those known: a book that was
        lost learns them again. A permit that is no longer among them was returned by a call that
        was lost: what was charged for it stays."""
        self._hear(ingress, time_s)
        before = {
            caller: account.held.pop(ingress, {}) for caller, account in self._accounts.items()
        }
        for caller, permits in held.items():
            account = self._account(caller, time_s)
            previous = before.get(caller, {})
            present = {p: n for p, n in permits.items() if not self._has_ended(p)}
            account.held[ingress] = present
            for permit, num_tokens in present.items():
                account.charge(num_tokens - self._charged(permit, previous), time_s=time_s)
        for previous in before.values():
            for permit, charged in previous.items():
                self._close(permit, charged)

    def held_by(self, ingress: str) -> Held:
        """Returns the permits that this ingress has given out."""
        permits_of = {
            caller: dict(account.held.get(ingress, {}))
            for caller, account in self._accounts.items()
        }
        return {caller: permits for caller, permits in permits_of.items() if permits}

    def _account(self, caller: str, time_s: float) -> _Account:
        return self._accounts.setdefault(caller, _Account(at_s=time_s))

    def _has_ended(self, permit: str) -> bool:
        return permit in self._closed and self._closed[permit] is None

    def _charged(self, permit: str, held: dict[str, int]) -> int:
        """Takes a permit out of those held or closed, and returns what is charged for it."""
        return held.pop(permit, 0) + (self._closed.pop(permit, 0) or 0)

    def _close(self, permit: str, charged: int | None) -> None:
        self._closed[permit] = charged
        if len(self._closed) > _MAX_CLOSED:
            self._closed.popitem(last=False)

    def _hear(self, ingress: str, time_s: float) -> None:
        self._received_s[ingress] = time_s
        silent = {name for name, at_s in self._received_s.items() if time_s - at_s > self._expiry_s}
        for name in silent:
            del self._received_s[name]
            for account in self._accounts.values():
                # Of requests that the service has lost; an ingress that was only silent tells of
                # its permits again.
                charged = sum(account.held.pop(name, {}).values())
                account.charge(-charged, time_s=time_s)


def _standing(account: _Account, quota: Quota, *, time_s: float, num_own: int = 0) -> Standing:
    """Returns how a caller stands without a request, for which `num_own` tokens are charged."""
    refusal: Refusal | None = None
    num_left, wait_s = 0, 0.0
    if quota.max_concurrent is not None and account.num_running >= quota.max_concurrent:
        refusal, wait_s = "concurrency", BUSY_RETRY_S
    if quota.tokens_per_minute is not None:
        account.rate = quota.tokens_per_minute / _MINUTE_S
        account.forget(time_s)
        num_owed = max(0.0, account.num_owed - num_own)
        left = quota.tokens_per_minute - num_owed
        if left < 1:
            refusal, wait_s = "tokens", (1 - left) / account.rate
        elif refusal is None:
            wait_s = num_owed / account.rate
        num_left = max(0, int(left))
    return Standing(
        refusal=refusal,
        num_running=account.num_running,
        num_tokens_left=num_left,
        wait_s=wait_s,
    )
