"""A fake of Kubernetes' API server, for Leases of one namespace: create, read, replace, patch, delete on a
condition, list, watch from a resource version, 410 for one that is too old, 409 for conflicts."""

from __future__ import annotations

import http.server
import json
import threading
import time
import urllib.parse

PATH = "/apis/coordination.k8s.io/v1/namespaces/ns/leases"


class ApiServer:
    def __init__(self):
        self._changed = threading.Condition()
        self._leases = {}
        self._events = []  # (resource version, type, object)
        self._version, self._oldest = 100, 0
        self._goes = threading.Event()
        self._goes.set()
        self.n_requests = 0
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self):
                fake._goes.wait()
                fake.n_requests += 1
                url = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(url.query))
                n = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(n)) if n else {}
                name = url.path[len(PATH) + 1 :]
                if not url.path.startswith(PATH):
                    return self.answer(404, fake.status(404, "NotFound"))
                if query.get("watch") in ("true", "True"):
                    return fake.watch(self, query)
                self.answer(*fake.request(self.command, name, body))

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

            def answer(self, code, value):
                data = json.dumps(value).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args):
                pass  # clients that leave

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def write_kubeconfig(self, path):
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": self.url}}],
                    "users": [{"name": "u", "user": {}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )

    def status(self, code, reason):
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": reason,
            "metadata": {},
        }

    def _put(self, kind, lease):
        self._version += 1
        lease["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, kind, json.loads(json.dumps(lease))))
        self._changed.notify_all()

    def request(self, method, name, body):
        with self._changed:
            there = self._leases.get(name)
            if method == "GET" and not name:
                items = list(self._leases.values())
                return 200, {
                    "kind": "LeaseList",
                    "apiVersion": "coordination.k8s.io/v1",
                    "metadata": {"resourceVersion": str(self._version)},
                    "items": items,
                }
            if method == "POST":
                name = body["metadata"]["name"]
                if name in self._leases:
                    return 409, self.status(409, "AlreadyExists")
                body["metadata"]["uid"] = f"u{self._version}"
                self._leases[name] = body
                self._put("ADDED", body)
                return 201, body
            if there is None:
                return 404, self.status(404, "NotFound")
            if method == "GET":
                return 200, there
            if method == "PUT":
                if body["metadata"].get("resourceVersion") != there["metadata"]["resourceVersion"]:
                    return 409, self.status(409, "Conflict")
                self._leases[name] = body
                self._put("MODIFIED", body)
                return 200, body
            if method == "PATCH":
                for part, values in body.items():
                    there[part].update(values)
                self._put("MODIFIED", there)
                return 200, there
            wanted = (body.get("preconditions") or {}).get("resourceVersion")
            if wanted not in (None, there["metadata"]["resourceVersion"]):
                return 409, self.status(409, "Conflict")
            del self._leases[name]
            self._put("DELETED", there)
            return 200, self.status(200, "Success")

    def watch(self, handler, query):
        at, until = int(query["resourceVersion"]), time.monotonic() + float(query["timeoutSeconds"])
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()

        def send(kind, obj):
            data = json.dumps({"type": kind, "object": obj}).encode() + b"\n"
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            handler.wfile.flush()

        while True:
            self._goes.wait()
            with self._changed:
                if at < self._oldest:
                    send("ERROR", self.status(410, "Expired"))
                    break
                new = [e for e in self._events if e[0] > at]
                if not new:
                    left = until - time.monotonic()
                    if left <= 0 or not self._changed.wait(left):
                        break
                    continue
            for version, kind, obj in new:
                send(kind, obj)
                at = version
        handler.wfile.write(b"0\r\n\r\n")

    def compact(self):
        """Nothing older than now can be watched from."""
        with self._changed:
            self._oldest = self._version
            self._changed.notify_all()

    def stop(self):
        self._goes.clear()

    def go_on(self):
        self._goes.set()

    def close(self):
        self._goes.set()
        self._server.shutdown()
        self._server.server_close()
