"""Requests that wait at ingresses because no pipeline is ready, as the router is told."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class IngressQueues:
    """The latest report of each ingress; one that is silent for `expiry_s` has gone."""

    expiry_s: float
    _reports: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    """By service and ingress: the number, and when it was reported."""

    def note(self, app: str, ingress: str, num_waiting: int, *, now_s: float) -> None:
        self._reports[app, ingress] = (num_waiting, now_s)

    def num_waiting(self, app: str, *, now_s: float) -> int:
        """Returns how many requests wait at all ingresses of a service."""
        oldest_s = now_s - self.expiry_s
        self._reports = {key: one for key, one in self._reports.items() if one[1] >= oldest_s}
        return sum(number for (of, _), (number, _) in self._reports.items() if of == app)
