"""An S3-protocol server on loopback, behind a proxy that can cut answers short, hold them back and count them."""

from __future__ import annotations

import http.client
import itertools
import logging
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEYS = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_DEFAULT_REGION": "us-east-1"}
_NUMBERS = itertools.count(1)
_OWN_HEADERS = ("content-length", "transfer-encoding", "connection", "date", "server")


class ObjectStore:
    """url: the endpoint. bucket: its own, for every server of a process shows the same ones.

    cut: key to how many answers carry half of it. served: key to answers sent. body_bytes: in them.
    status: key to the HTTP status that is answered instead. hold_after: let so many objects through, then answer
    no more until `release`; `held` is set when a request waits.
    """

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._moto.start()
        self.behind = self._moto.get_host_and_port()
        self.bucket = f"pictures-{next(_NUMBERS)}"
        self.cut: Counter[str] = Counter()
        self.status: dict[str, int] = {}
        self.served: Counter[str] = Counter()
        self.body_bytes = 0
        self.hold_after: int | None = None
        self.held, self.release = threading.Event(), threading.Event()
        self.lock = threading.Lock()
        self._proxy = _Proxy(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._proxy.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._proxy.server_address[1]}"

    def put(self, files: dict[str, bytes], prefix: str) -> None:
        """Store files under `prefix`/."""
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=f"http://{self.behind[0]}:{self.behind[1]}",
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
            region_name=KEYS["AWS_DEFAULT_REGION"],
        )
        client.create_bucket(Bucket=self.bucket)
        for name, content in files.items():
            client.put_object(Bucket=self.bucket, Key=f"{prefix}/{name}", Body=content)

    def close(self) -> None:
        """Stop answering; a second call does nothing."""
        self.release.set()
        self._proxy.shutdown()
        self._proxy.server_close()
        self._moto.stop()


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed or lose patience are part of the tests."""


def _handler(store: ObjectStore) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            key = self.path.split("?")[0].removeprefix(f"/{store.bucket}").lstrip("/")
            is_object = self.command == "GET" and bool(key)
            if is_object:
                _wait(store)
            status, headers, body = self._ask()
            if key in store.status:
                status, body = store.status[key], b""
            if is_object:
                with store.lock:
                    if store.cut[key] > 0:
                        store.cut[key] -= 1
                        body = body[: len(body) // 2]
                    store.served[key] += 1
                    store.body_bytes += len(body)
            self.send_response(status)
            for name, value in headers:
                # Some stores send no checksums: what is short must be found without.
                if name.lower() not in _OWN_HEADERS and not name.lower().startswith("x-amz-checksum"):
                    self.send_header(name, value)
            length = dict(headers).get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
            self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_GET

        def _ask(self) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection(*store.behind)
            connection.request(self.command, self.path, headers=dict(self.headers))
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            return answer.status, answer.getheaders(), body

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    return Handler


def _wait(store: ObjectStore) -> None:
    with store.lock:
        through = store.hold_after is None or store.hold_after > 0
        if store.hold_after is not None:
            store.hold_after -= 1
    if not through:
        store.held.set()
        store.release.wait()
