"""The agent's HTTP: probes and metrics on an address that Kubernetes and Prometheus reach.

    GET /healthz              200 while the agent's threads go on; the registry may be away
    GET /readyz               200 while the daemon answers, is ready, and nobody leaves
    GET /metrics              the daemon's page, and the agent's own
    GET /v1/sequences         what the daemon has open             with the token
    GET /v1/tenants           who shares it, and what they use     with the token
    POST /v1/move             {"sequence": N, "to": NAME}          with the token
    POST /v1/evacuate         sends all away, as SIGTERM does      with the token

The token is in a file, as `Authorization: Bearer TOKEN`; without the file those answer
nobody. One request for each connection, a bounded number at a time, each within seconds.
"""

from __future__ import annotations

import hmac
import http.server
import json
import logging
import pathlib
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any

import urllib3

log = logging.getLogger("attnd.agent")
_MAX_REQUESTS = 32
_MAX_BODY = 1 << 16
_SECONDS = 5.0

Answer = tuple[int, str, bytes]  # status, type, body
Route = Callable[[dict[str, Any]], Answer]


def text(status: int, words: str) -> Answer:
    return status, "text/plain; charset=utf-8", words.encode() + b"\n"


def json_answer(status: int, value: Any) -> Answer:
    return status, "application/json", json.dumps(value).encode() + b"\n"


class Web:
    """Serves routes: {"GET /path": function of the request's JSON body}. close() ends it.

    address     HOST:PORT, [HOST6]:PORT; port 0: one that is free
    guarded     paths for which the token is wanted
    cert, key   files; None: without TLS
    Raises OSError, ValueError (address).
    """

    def __init__(
        self,
        address: str,
        routes: dict[str, Route],
        guarded: set[str],
        token_file: str | None = None,
        cert: str | None = None,
        key: str | None = None,
    ):
        host, _, port = address.rpartition(":")
        if not port.isdigit():
            raise ValueError(f"http is {address!r}, expected HOST:PORT")
        host = host.strip("[]")
        self._routes, self._guarded, self._token_file = routes, guarded, token_file
        self._places = threading.BoundedSemaphore(_MAX_REQUESTS)
        context = None
        if cert is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert, key)
        web = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = _SECONDS
            server_version, sys_version = "attnd-agent", ""

            def do_GET(self) -> None:
                web._answer(self)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                log.debug("http: " + format, *args)

        class Server(http.server.ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

            def process_request(self, request: Any, client_address: Any) -> None:
                if not web._places.acquire(blocking=False):
                    self.shutdown_request(request)
                    return
                super().process_request(request, client_address)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    request.settimeout(_SECONDS)
                    if context is not None:  # here, not in accept's thread, which must not wait
                        request = context.wrap_socket(request, server_side=True)
                    super().process_request_thread(request, client_address)
                except OSError as e:
                    log.debug("http: %s: %s", client_address, e)
                    request.close()
                finally:
                    web._places.release()

            def handle_error(self, request: Any, client_address: Any) -> None:
                log.debug("http: %s", client_address, exc_info=True)

        self._server = Server((host, int(port)), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="attnd-http", daemon=True
        )
        self._thread.start()

    def _answer(self, h: http.server.BaseHTTPRequestHandler) -> None:
        path = h.path.partition("?")[0]
        route = self._routes.get(f"{h.command} {path}")
        if route is None:
            answer = text(404, "no such page")
        elif path in self._guarded and not self._may(h.headers.get("Authorization", "")):
            answer = text(403, "the agent's token is wanted (--token-file)")
        else:
            answer = self._call(route, h)
        status, kind, body = answer
        h.send_response(status)
        h.send_header("Content-Type", kind)
        h.send_header("Content-Length", str(len(body)))
        h.end_headers()
        h.wfile.write(body)

    def _call(self, route: Route, h: http.server.BaseHTTPRequestHandler) -> Answer:
        try:
            n = int(h.headers.get("Content-Length", 0))
            if not 0 <= n <= _MAX_BODY:
                return text(413, f"a body of {n} bytes, expected {_MAX_BODY} at most")
            body = json.loads(h.rfile.read(n)) if n else {}
            if not isinstance(body, dict):
                return text(400, "the body is no JSON object")
            return route(body)
        except (KeyError, ValueError, TypeError) as e:
            return text(400, f"{type(e).__name__}: {e}")
        except Exception as e:
            log.exception("%s %s", h.command, h.path)
            return text(500, f"{type(e).__name__}: {e}")

    def _may(self, said: str) -> bool:
        if self._token_file is None:
            return False
        try:
            token = pathlib.Path(self._token_file).read_text().split("\n")[0].strip()
        except OSError as e:
            log.warning("token: %s", e)
            return False
        return token != "" and hmac.compare_digest(said.encode(), f"Bearer {token}".encode())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Relay:
    """The daemon's /metrics, as listen.http has it on loopback."""

    def __init__(self, url: str | None):
        self._url = url
        self._pool = urllib3.PoolManager(num_pools=1, maxsize=1)

    def read(self) -> bytes:
        """b"": there is none, or it does not answer."""
        if self._url is None:
            return b""
        try:
            r = self._pool.request("GET", self._url, timeout=_SECONDS / 2, retries=False)
            data: bytes = r.data if r.status == 200 else b""
            return data
        except urllib3.exceptions.HTTPError as e:
            log.debug("metrics: %s", e)
            return b""
