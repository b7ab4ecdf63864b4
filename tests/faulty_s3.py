"""An S3 server that misbehaves on request: a proxy in front of a real one.

In: the AWS variables of a server. Out: the same server at another endpoint, with faults in chosen requests.

    client ─▶ FaultyS3 ─▶ server        proxy.fail(Fault.SLOW_DOWN, times=3)
                │                       store.put("key", b"…")
                └─ proxy.requests       assert [request.method for request in proxy.requests] == ["PUT"] * 4
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import http.client
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials


class Fault(enum.Enum):
    """What happens to a request; one with a status is answered without asking the server."""

    SLOW_DOWN = (503, "SlowDown", "Please reduce your request rate.")
    INTERNAL_ERROR = (500, "InternalError", "We encountered an internal error. Please try again.")
    CONFLICT = (409, "ConditionalRequestConflict", "A conflicting operation is in progress.")
    QUOTA_EXCEEDED = (403, "QuotaExceeded", "")  # as Ceph answers
    READ_ONLY = (403, "AccessDenied", "Access Denied.")  # these keys may read and not write
    DISK_FULL = (507, "XMinioStorageFull", "Storage backend has reached its minimum free drive threshold.")
    REFUSE_CONDITION = (501, "NotImplemented", "A header you provided implies functionality not implemented.")
    REFUSE_CHECKSUM = (501, "NotImplemented", "A header you provided implies functionality that is not implemented.")
    IGNORE_CONDITION = "`If-None-Match` is taken away: a server that does not know it"
    CHECK_THEN_WRITE = "a server that looks for the key and then writes: of two writers at once both win"
    DAMAGE = "a bit of the request's body is flipped (for servers that check no signature), or else one of the answer's"
    CUT_REQUEST = "the connection ends when the server has half of the request's body"
    CUT_ANSWER = "the connection ends when the client has half of the answer's body"
    LOSE_ANSWER = "the server does what it was asked to, and the connection ends before its answer"
    STALL = "no answer at all until the proxy is closed"


ABOUT = dict.fromkeys(
    [Fault.IGNORE_CONDITION, Fault.REFUSE_CONDITION, Fault.CONFLICT, Fault.CHECK_THEN_WRITE], "if-none-match"
)
ABOUT[Fault.REFUSE_CHECKSUM] = "x-amz-checksum"
"""They happen only to requests with a header that begins so."""
NOT_FORWARDED = {"connection", "expect", "transfer-encoding", "content-length"}
ALWAYS = 10**9


@dataclass(frozen=True)
class Request:
    """One request that the proxy saw, in the order they came."""

    method: str
    num_bytes: int
    """Length of the answer's body; 0 if there was no answer."""


@dataclass
class _Plan:
    fault: Fault
    times: int
    method: str
    part: str


class FaultyS3:
    """The proxy. Requests pass unchanged until `fail` is called."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.server = variables
        self.requests: list[Request] = []
        self.closing = threading.Event()
        self.is_up = threading.Event()
        """Requests wait until it is set."""
        self.is_up.set()
        self.two_writers = threading.Barrier(2)
        self._plans: list[_Plan] = []
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self._http.daemon_threads = True
        self.variables = {**variables, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._http.server_port}"}

    def fail(self, fault: Fault, *, times: int = 1, method: str = "PUT", part: str = "") -> None:
        """Let the next `times` requests of this method fail, of those with `part` in their path and query."""
        with self._lock:
            self._plans.append(_Plan(fault, times, method, part))

    def heal(self) -> None:
        """Let everything pass from now on."""
        with self._lock:
            self._plans.clear()

    def take(self, method: str, path: str, *, headers: Iterable[str]) -> Fault | None:
        """The fault of this request, which is then used up."""
        with self._lock:
            for plan in self._plans:
                fits = plan.method == method and plan.part in path
                about = ABOUT.get(plan.fault, "")
                if plan.times and fits and any(name.lower().startswith(about) for name in headers):
                    plan.times -= 1
                    return plan.fault
        return None

    @property
    def all_faults_happened(self) -> bool:
        """True when nothing that `fail` ordered is left."""
        return not any(plan.times for plan in self._plans)

    @contextlib.contextmanager
    def running(self) -> Iterator[FaultyS3]:
        """Serve until the context ends."""
        thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.closing.set()
            self.is_up.set()
            self._http.shutdown()
            self._http.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultyS3
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _serve(self) -> None:
        proxy = self.proxy
        proxy.is_up.wait()
        assert "Transfer-Encoding" not in self.headers, "the proxy reads bodies by their length"
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in NOT_FORWARDED}
        fault = proxy.take(self.command, self.path, headers=list(self.headers))
        status, answer_headers, answer = 0, dict[str, str](), b""
        if fault is Fault.STALL:
            proxy.closing.wait()
        elif fault is Fault.CUT_REQUEST:
            assert len(body) > 1, "only a request with a body can be cut in its middle"
            with contextlib.closing(self._upstream(headers, len(body))) as connection:
                connection.send(body[: len(body) // 2])
        elif fault is not None and isinstance(fault.value, tuple):
            status, code, message = fault.value
            answer = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            answer_headers["Content-Type"] = "application/xml"
        else:
            is_free = fault is Fault.CHECK_THEN_WRITE and self._is_free()
            if fault is Fault.IGNORE_CONDITION or is_free:
                headers = self._signed_again({k: v for k, v in headers.items() if k.lower() != "if-none-match"}, body)
            damaged = fault is Fault.DAMAGE
            status, answer_headers, answer = self._forward(headers, _damaged(body) if damaged and body else body)
            answer = _damaged(answer) if damaged and not body else answer
        is_answered = bool(status) and fault is not Fault.LOSE_ANSWER
        proxy.requests.append(Request(self.command, len(answer) if is_answered else 0))
        if is_answered:
            body = b"" if self.command == "HEAD" else answer
            self._answer(status, answer_headers, body, cut=fault is Fault.CUT_ANSWER)
        else:
            self._cut()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _forward(self, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        with contextlib.closing(self._upstream(headers, len(body))) as connection:
            connection.send(body)
            answer = connection.getresponse()
            data = answer.read()
            kept = {k: v for k, v in answer.getheaders() if k.lower() not in NOT_FORWARDED - {"content-length"}}
            return answer.status, kept, data

    def _is_free(self) -> bool:
        """Whether nothing has this key; if so, after a moment in which another request may ask the same."""
        empty = hashlib.sha256(b"").hexdigest()
        headers = {"Host": self.headers["Host"], "x-amz-content-sha256": empty}
        command, self.command = self.command, "HEAD"
        status, _, _ = self._forward(self._signed_again(headers, b""), b"")
        self.command = command
        if status == 404:
            with contextlib.suppress(threading.BrokenBarrierError):
                self.proxy.two_writers.wait(timeout=0.3)
        return status == 404

    def _upstream(self, headers: dict[str, str], length: int) -> http.client.HTTPConnection:
        """A connection to the real server that has got the request's head; its Host stays the proxy's, as signed."""
        server = urlsplit(self.proxy.server["AWS_ENDPOINT_URL"])
        connection = http.client.HTTPConnection(server.hostname or "", server.port, timeout=60)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            connection.putheader(name, value)
        connection.endheaders()
        return connection

    def _signed_again(self, headers: dict[str, str], body: bytes) -> dict[str, str]:
        """The same request without one of the headers the client has signed."""
        variables = self.proxy.server
        credentials = Credentials(variables["AWS_ACCESS_KEY_ID"], variables["AWS_SECRET_ACCESS_KEY"])
        unsigned = {k: v for k, v in headers.items() if k.lower() not in ("authorization", "x-amz-date")}
        request = AWSRequest(self.command, f"{self.proxy.variables['AWS_ENDPOINT_URL']}{self.path}", unsigned, body)
        S3SigV4Auth(credentials, "s3", variables["AWS_DEFAULT_REGION"]).add_auth(request)
        return dict(request.headers.items())

    _headers_buffer: list[bytes]  # what send_response_only and send_header write into

    def _answer(self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "content-length" not in {name.lower() for name in headers} and status != 204:
            self.send_header("Content-Length", str(len(body)))
        self._headers_buffer.append(b"\r\n")  # head and body leave in one piece
        whole = b"".join(self._headers_buffer) + body
        self._headers_buffer.clear()
        self.wfile.write(whole[: len(whole) - len(body) // 2 - 1] if cut else whole)
        if cut:
            self._cut()

    def _cut(self) -> None:
        """Reset the connection instead of closing it politely."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True


def _damaged(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
