"""An operator's access to a running service: its router and its pipelines, over Ray.

Access to a cluster's Ray is full access to the cluster, so these are the service's admin rights.
Over HTTP, a holder of the API key can drain pipelines, and change nothing else. Ray's exceptions
are converted to this project's.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from eesd_dist.errors import ConfigError, EesdError, EngineError
from eesd_dist.routing.directory import PipelineReport
from eesd_dist.workers.messages import HeadReport
from serve_app.config import RouterConfig
from serve_app.pipeline.drain import Drained
from serve_app.router.actor import find_router
from serve_app.service.local_ray import connected_ray
from serve_app.service.ray_failures import reason_of

_ANSWER_TIMEOUT_S = 15.0
_LOAD_TIMEOUT_S = 900.0
_DRAIN_TIMEOUT_S = 3600.0
"""Pages are copied as long as that makes progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConnection:
    """Calls the router and the pipelines of a running service."""

    router: Any
    app_name: str

    def pin(self) -> None:
        self._ask("pin")

    def unpin(self) -> None:
        self._ask("unpin")

    def priors(self) -> Mapping[str, object]:
        """Returns all pools, in the form that `set_priors` takes."""
        priors: Mapping[str, object] = self._ask("priors")
        return priors

    def set_priors(self, snapshot: Mapping[str, object]) -> int:
        """Replaces the pools; returns the number of classes. Raises ConfigError for an invalid
        snapshot."""
        return int(self._ask("set_priors", snapshot))

    def load_head(self, folder: str, *, instead_of: Collection[str] = ()) -> list[HeadReport]:
        """Loads an exit head into every pipeline, for use from its next round on.

        `instead_of` are the heads (sha256) that it may replace; empty: any. Raises CheckpointError
        or ConfigError when it does not fit, or when a pipeline drafts with another head: nothing
        has changed then. Raises EngineError when only some of the pipelines took it.
        """
        if instead_of:
            self._require_drafts_with(instead_of, new=folder)
        answers = self._ask_pipelines("load_head", folder, timeout_s=_LOAD_TIMEOUT_S)
        reports = [answer for answer in answers if isinstance(answer, HeadReport)]
        refusals = [our_error(answer) for answer in answers if isinstance(answer, Exception)]
        if refusals and reports:
            raise EngineError(
                f"{len(reports)} of {len(answers)} pipelines took {folder}, the others did not: "
                f"{refusals[0]}; promote it again, or the head from before"
            )
        if refusals:
            raise refusals[0]
        if not reports:
            raise EngineError(f"no pipeline of {self.app_name!r} is running")
        return reports

    def leaders(self) -> list[Any]:
        """Returns the drafting actors that take requests now."""
        reports = self._ask_pipelines("report", timeout_s=_ANSWER_TIMEOUT_S)
        return [
            report.address
            for report in reports
            if isinstance(report, PipelineReport)
            and report.takes_requests
            and report.address is not None
        ]

    def drain(self, pipeline: str) -> Drained:
        """Drains a pipeline: its live streams continue in others, and it takes no more requests.

        Raises ConfigError if no pipeline has this name, or no other pipeline takes requests.
        """
        drained: Drained = self._ask_pipeline("drain", pipeline)
        return drained

    def undrain(self, pipeline: str) -> None:
        self._ask_pipeline("undrain", pipeline)

    def _ask_pipeline(self, method: str, name: str) -> Any:
        """Returns the answer of the named pipeline; the others answer None."""
        answers = self._ask_pipelines(method, name, timeout_s=_DRAIN_TIMEOUT_S)
        for answer in answers:
            if isinstance(answer, Exception):
                raise our_error(answer)
            if answer is not None:
                return answer
        raise ConfigError(
            f"no pipeline {name!r} in {self.app_name!r}, which has {len(answers)}: `eesd "
            "pipelines` lists them"
        )

    def _require_drafts_with(self, expected: Collection[str], *, new: str) -> None:
        for answer in self._ask_pipelines("control", timeout_s=_ANSWER_TIMEOUT_S):
            if isinstance(answer, Exception):
                raise our_error(answer)
            head = answer.control.head
            if head is not None and head.sha256 not in expected:
                raise ConfigError(
                    f"not promoted: {answer.pipeline} drafts with {head.folder} "
                    f"({head.sha256[:12]}), expected the head that {new} was compared with: "
                    "refresh the serving head, or promote this one with `eesd controllers promote`"
                )

    def _ask_pipelines(self, method: str, *arguments: object, timeout_s: float) -> list[Any]:
        """Returns an answer, or an exception, of each."""
        try:
            pipelines = serve.get_deployment_handle("Pipeline", self.app_name)
            answers: list[Any] = pipelines.broadcast(method, *arguments).results(
                timeout_s=timeout_s, return_exceptions=True
            )
        except (ray.exceptions.RayError, RayServeException, TimeoutError) as error:
            raise EngineError(
                f"no pipeline of {self.app_name!r} answers: {reason_of(error)}"
            ) from error
        return answers

    def _ask(self, method: str, *arguments: object) -> Any:
        try:
            return ray.get(
                getattr(self.router, method).remote(*arguments), timeout=_ANSWER_TIMEOUT_S
            )
        except ray.exceptions.RayError as error:
            raise our_error(error) from error


@contextmanager
def service_connection(
    address: str, *, router: RouterConfig, app_name: str
) -> Iterator[ServiceConnection]:
    """Connects to a service; a Ray that this process is connected to already is used and kept.

    Raises ConfigError if there is no such cluster, EngineError if it has no router.
    """
    with ExitStack() as entered:
        if not ray.is_initialized():
            entered.enter_context(connected_ray(address, shows_logs=False))
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
        yield ServiceConnection(router=find_router(router), app_name=app_name)


def our_error(error: Exception) -> EesdError:
    """Returns this project's error that another process has raised, or one that names Ray's."""
    cause = getattr(error, "cause", None)
    for candidate in (cause, error):
        if isinstance(candidate, EesdError):
            return candidate
    return EngineError(f"{type(error).__name__}: {reason_of(error)}")
