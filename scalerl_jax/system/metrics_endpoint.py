"""--metrics_port: the metrics of a process for Prometheus, over HTTP.

GET /metrics answers with the metrics of a separate registry, in the text format of Prometheus. It is
read-only, without authentication: it listens on the loopback interface, or on --metrics_host.

Needs prometheus_client, which is imported only here. A collector is a function that builds the metrics at each
request; it runs on a thread of the endpoint.
"""

import contextlib
import importlib.util
import socket
import socketserver
import threading
import wsgiref.simple_server
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# A request is one line and an answer some kilobytes; slower clients, and more at once, are cut off.
REQUEST_SECONDS = 10.0
MOST_REQUESTS = 8

# (name, what it is, "gauge" | "counter" | "info", label names, label values -> value)
Samples = Mapping[Any, float]  # keys: tuple[str, ...], one for each label
Family = tuple[str, str, str, tuple[str, ...], Samples]
Collect = Callable[[], Iterable[Family]]


class MetricsEndpoint:
    """Serves until close(). `port` is the port it listens on."""

    def __init__(self, collect: Collect, *, host: str, port: int):
        """port: 0 takes a free one. Raises ValueError, one line that names the flags, if it cannot listen there."""
        where = f"--metrics_port={port}"
        if importlib.util.find_spec("prometheus_client") is None:
            raise ValueError(f"{where}: needs prometheus_client, which pip install 'scalerl-jax[metrics]' brings")
        import prometheus_client

        try:
            family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
            kind = type("_MetricsServer", (_MetricsServer,), {"address_family": family})
            self._server = kind(address[:2], _Handler)
        except OSError as error:
            why = error.strerror or error
            raise ValueError(f"{where} --metrics_host={host}: cannot listen there ({why})") from None
        self._server.set_app(_or_unavailable(prometheus_client.make_wsgi_app(_registry(collect))))
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> "MetricsEndpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def page(collect: Collect) -> tuple[bytes, str]:
    """The endpoint's answer and its content type, for a process that serves HTTP itself."""
    import prometheus_client

    return prometheus_client.generate_latest(_registry(collect)), prometheus_client.CONTENT_TYPE_LATEST


def _registry(collect: Collect) -> Any:
    from prometheus_client.core import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(_Collector(collect))
    return registry


def _or_unavailable(app: Callable[..., Any]) -> Callable[..., Any]:
    """The app, but it answers 503 with the reason if the metrics are unavailable (TimeoutError, RuntimeError)."""

    def answer(environment: Any, start_response: Callable[..., Any]) -> Any:
        try:
            return app(environment, start_response)
        except (TimeoutError, RuntimeError) as error:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{type(error).__name__}: {error}\n".encode()]

    return answer


class _Collector:
    """The collector that prometheus_client calls at each request. It has no `describe`: the metrics may not be known
    yet."""

    def __init__(self, collect: Collect):
        self._collect = collect

    def collect(self) -> Iterable[Any]:
        from prometheus_client import core

        kinds = {
            "gauge": core.GaugeMetricFamily,
            "counter": core.CounterMetricFamily,
            "info": core.InfoMetricFamily,
        }
        for name, description, kind, labels, samples in self._collect():
            made = kinds[kind](name, description, labels=() if kind == "info" else labels)
            for values, value in samples.items():
                if kind == "info":
                    made.add_metric([], dict(zip(labels, values, strict=True)))
                else:
                    made.add_metric(values, value)
            yield made


class _MetricsServer(socketserver.ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    daemon_threads = True

    def __init__(self, *arguments: Any):
        self._places = threading.BoundedSemaphore(MOST_REQUESTS)
        super().__init__(*arguments)

    def server_bind(self) -> None:
        """As in http.server, but without asking the name service for this machine's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Drops errors: a client that hangs up or stays silent needs no traceback; a collector's faults are answered
        with 500."""


class _Handler(wsgiref.simple_server.WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def handle(self) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError):
            super().handle()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing: it would be a line every few seconds."""
