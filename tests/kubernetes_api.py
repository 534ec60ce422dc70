"""A stand-in for Kubernetes' API server: the pods of one node."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec


class Kubernetes(BaseHTTPRequestHandler):
    """The API's answer for one node, and what it was asked."""

    status, pods, asked = 200, list[dict[str, Any]](), list[tuple[str, str]]()

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization", "")))
        body = msgspec.json.encode({"kind": "PodList", "items": self.pods})
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def kubernetes_api(*pods: dict[str, Any]) -> Iterator[str]:
    """Gives the server's URL; one server at a time."""
    Kubernetes.status, Kubernetes.pods, Kubernetes.asked = 200, list(pods), []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Kubernetes)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
