"""Reports of a service's ingresses to the router: requests that wait, settings, metrics."""

from dataclasses import dataclass, field

from eesd_dist.routing.fleet.size import FleetTargets


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressReport:
    """Latest report of one ingress."""

    num_waiting: int
    """Requests for which no pipeline is ready."""
    targets: FleetTargets | None
    """Targets of autoscaling, from its `user_config`; None: those of the application."""
    received_s: float


@dataclass(slots=True)
class IngressReports:
    """The latest report of each ingress; one that is silent for `expiry_s` has gone."""

    expiry_s: float
    _reports: dict[tuple[str, str], IngressReport] = field(default_factory=dict)
    """Reports by service and ingress."""
    _pages: dict[tuple[str, str], bytes] = field(default_factory=dict)
    """Metrics of the same ingresses, as Prometheus text."""

    def note(self, app: str, ingress: str, report: IngressReport) -> None:
        self._drop_silent(report.received_s)
        self._reports[app, ingress] = report

    def note_page(self, app: str, ingress: str, page: bytes) -> None:
        self._pages[app, ingress] = page

    def pages(self, app: str, *, time_s: float) -> dict[str, bytes]:
        """Returns the latest metrics of each ingress of a service that is not silent."""
        self._drop_silent(time_s)
        return {ingress: page for (of, ingress), page in self._pages.items() if of == app}

    def num_waiting(self, app: str, *, time_s: float) -> int:
        """Returns how many requests wait at all ingresses of a service."""
        return sum(report.num_waiting for report in self._of(app, time_s))

    def latest(self, app: str, *, time_s: float) -> IngressReport | None:
        """Returns the latest report of a service's ingresses; None if there is none, as in a router
        that was just restarted. While an update of targets reaches one ingress after the other,
        reports differ."""
        return max(self._of(app, time_s), key=lambda report: report.received_s, default=None)

    def _of(self, app: str, time_s: float) -> list[IngressReport]:
        self._drop_silent(time_s)
        return [report for (of, _), report in self._reports.items() if of == app]

    def _drop_silent(self, time_s: float) -> None:
        oldest_s = time_s - self.expiry_s
        self._reports = {
            k: report for k, report in self._reports.items() if report.received_s >= oldest_s
        }
        self._pages = {k: page for k, page in self._pages.items() if k in self._reports}
