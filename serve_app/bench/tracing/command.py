"""`eesd bench tracing`: runs `measure` over services on one Ray instance, over HTTP."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from psutil import NoSuchProcess, Process

from eesd_dist.config import EngineConfig, ModelConfig, ParallelConfig
from serve_app.bench.options import TracingBenchOptions
from serve_app.bench.ports import free_port
from serve_app.bench.tracing import measure
from serve_app.bench.tracing.measure import Services
from serve_app.config import RouterConfig, ServiceConfig, TelemetryConfig
from serve_app.session.environment import prepare_for_local_ray

_HOST = "127.0.0.1"
_SPARE_CPUS = 2


class Collector:
    """Takes spans over HTTP, and counts them at the end: it runs on the same processors."""

    def __init__(self) -> None:
        bodies: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                return

        self._bodies = bodies
        self._server = ThreadingHTTPServer((_HOST, 0), Handler)
        self.endpoint = f"http://{_HOST}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def num_spans(self) -> int:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        requests = map(ExportTraceServiceRequest.FromString, tuple(self._bodies))
        return sum(
            len(scope.spans)
            for request in requests
            for each in request.resource_spans
            for scope in each.scope_spans
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def services(options: TracingBenchOptions) -> Iterator[Services]:
    """Runs Ray, Serve and three services within the block."""
    from ray import serve  # Ray reads the environment when it is imported

    from serve_app.app import build_app
    from serve_app.session.local_ray import local_ray

    collector = Collector()
    telemetry = {
        "off": TelemetryConfig(max_traces_kept=0),
        "kept": TelemetryConfig(),
        "sent": TelemetryConfig(otlp_endpoint=collector.endpoint, sampler="parentbased_always_on"),
    }
    port = free_port(_HOST)
    configs = {name: _config(name, options, port, each) for name, each in telemetry.items()}
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    min_cpus = _SPARE_CPUS + len(configs) * (2 + options.verify_tp)
    with local_ray(configs["off"], shows_logs=False, min_cpus=min_cpus):
        serve.start(http_options={"host": _HOST, "port": port}, proxy_location="HeadOnly")
        try:
            serve.run_many(
                [
                    serve.RunTarget(
                        target=build_app(config), name=config.app_name, route_prefix=f"/{name}"
                    )
                    for name, config in configs.items()
                ]
            )
            urls = {name: f"http://{_HOST}:{port}/{name}" for name in configs}
            yield Services(urls=urls, num_spans=collector.num_spans, cpu_seconds=_cpu_of_children)
        finally:
            serve.shutdown()
            collector.close()


def _cpu_of_children() -> float:
    return sum(_cpu_of(Process().children(recursive=True)))


def _cpu_of(processes: Sequence[Process]) -> Iterator[float]:
    for process in processes:
        try:
            times = process.cpu_times()
        except NoSuchProcess:  # it has ended
            continue
        yield times.user + times.system


def _config(
    name: str, options: TracingBenchOptions, port: int, telemetry: TelemetryConfig
) -> ServiceConfig:
    return ServiceConfig(
        engine=EngineConfig(
            model=ModelConfig(path=options.model),
            parallel=ParallelConfig(verify_tensor_parallel_size=options.verify_tp),
        ),
        app_name=f"eesd-{name}",
        port=port,
        router=RouterConfig(name=f"eesd-router-{name}"),
        telemetry=telemetry,
    )


def main(options: TracingBenchOptions) -> int:
    prepare_for_local_ray()  # once: a process keeps the first token it has read
    return measure.run(options, start=services)
