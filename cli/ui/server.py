"""The page's server: who may ask, and what is answered.

    GET  /                                the page, without data          GET /plotly.js
    GET  /api/runs, /api/metrics          every run; what metrics mean
    GET  /api/runs/RUN/PART?…             a part of `data`; with an ETag those that follow a run
    POST /api/runs/RUN/promote            {"version": 3}: the gate, then the alias `champion`
    POST /api/runs/RUN/index              brings the search index up to date
    POST /api/login                       {"token": "…"}: a cookie for this browser

Every request names a host that is this server's, so that no other site's name can be pointed at it (DNS rebinding).
With a token, /api wants it, as a bearer or in the cookie. What changes something wants a header that a form of another
site cannot send, and this server's own origin.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field

from cli.operate.promote import bring_to_mlflow
from cli.ui import search
from cli.ui.data import Pages, as_json
from cli.ui.metrics import described
from cli.ui.page import PLOTLY, plotly_js, render
from settings.errors import NotFound, UserError
from settings.redaction import without_secrets
from storage.log.promotion import NotPromoted, gap_of, promote
from storage.log.runs import open_run, run_config
from storage.objects.object_store import ObjectStore
from storage.objects.opening import is_away

COOKIE = "millrace_ui"
MOST_BODY = 10_000
"""Bytes of the body of a request, which is read before its token is."""
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class _Promotion(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: int = Field(ge=0)


class _Login(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    token: str = Field(max_length=1000)


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def create_app(store: ObjectStore, *, host: str = "127.0.0.1", token: str = "") -> FastAPI:
    """The server of a store's runs, listening on `host`. Without a token, every client that reaches it may ask."""
    pages = Pages(store)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        response = _refused(request, host=host, token=token) or await answer(request)
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    @app.exception_handler(UserError)
    @app.exception_handler(OSError)
    async def failed(_: Request, error: Exception) -> Response:
        status = 404 if isinstance(error, NotFound) else 409 if isinstance(error, NotPromoted) else 400
        if is_away(store, error):
            status = 503
        return _json({"error": without_secrets(str(error)).removeprefix("--")}, status)

    @app.exception_handler(RequestValidationError)
    async def misread(_: Request, error: RequestValidationError) -> Response:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        return _json({"error": "; ".join(problems)}, 422)  # without the input, which may be no JSON

    @app.get("/")
    def page() -> Response:
        return Response(render(), media_type="text/html; charset=utf-8")

    @app.get(PLOTLY)
    def plotly() -> Response:
        return Response(plotly_js(), media_type="text/javascript", headers={"Cache-Control": "max-age=3600"})

    @app.post("/api/login")
    def login(body: _Login) -> Response:
        if not hmac.compare_digest(body.token.encode(), token.encode()):
            return _json({"error": "that is not this server's token"}, 401)
        response = _json({})
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict", max_age=30 * 86400)
        return response

    @app.get("/api/metrics")
    def metrics() -> Response:
        return _json(described())

    @app.get("/api/runs")
    def runs() -> Response:
        return _json(pages.runs())

    @app.get("/api/runs/{run}/{part}")
    def part(run: str, part: str, request: Request) -> Response:
        tag = f'W/"{pages.version(run)}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        return _json(pages.get(run, part, **dict(request.query_params)), headers={"ETag": tag})

    @app.post("/api/runs/{run}/promote")
    def promote_policy(run: str, body: _Promotion) -> Response:
        log = open_run(store, run, appends=True)
        alias = promote(log, body.version, max_gap=gap_of(run_config(log)))
        return _json({"champion": alias.version, "mlflow": bring_to_mlflow(log)})

    @app.post("/api/runs/{run}/index")
    def index(run: str) -> Response:
        return _json({"trajectories": search.update_index(open_run(store, run))})

    return app


def _refused(request: Request, *, host: str, token: str) -> Response | None:
    """The answer to a request that is not let through."""
    named = request.headers.get("host", "")
    if not _is_ours(_host_of(f"//{named}"), host):
        return _json({"error": f"this server is not {named!r}; open it by its address, or as localhost"}, 421)
    if request.method not in ("GET", "HEAD"):
        origin = request.headers.get("origin")
        if (origin and origin.partition("://")[2] != named) or request.headers.get("x-millrace") != "ui":
            return _json({"error": "this request comes from another site"}, 403)
        if not _is_short(request.headers.get("content-length", "")):
            return _json({"error": f"say the length of the body, at most {MOST_BODY:,} bytes"}, 413)
    path = request.url.path
    if token and path.startswith("/api/") and path != "/api/login":
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = (bearer, request.cookies.get(COOKIE, ""))
        if not any([hmac.compare_digest(each.encode(), token.encode()) for each in given]):
            return _json({"error": "this server wants its token"}, 401)
    return None


def _host_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:  # it is no address
        return ""


def _is_short(length: str) -> bool:
    return re.fullmatch(r"\d{1,5}", length) is not None and int(length) <= MOST_BODY


def _is_ours(named: str, host: str) -> bool:
    """True for a name under which this server is reached: another site's name that leads here is none."""
    if is_loopback(named) or named == host:
        return True
    if is_loopback(host):
        return False
    try:
        ipaddress.ip_address(named)
        return True  # no other name can lead to an address
    except ValueError:
        return named in (socket.gethostname(), socket.getfqdn())


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(as_json(value), status_code=status, headers=headers, media_type="application/json")


class _Server(uvicorn.Server):
    """uvicorn looks ten times a second whether it should end, a percent of a core; this one is woken."""

    async def main_loop(self) -> None:
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if not self.should_exit:
            await self._ended.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        with contextlib.suppress(AttributeError):  # it has not begun
            self._loop.call_soon_threadsafe(self._ended.set)


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Answer on a socket until Ctrl-C or SIGTERM."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, proxy_headers=False, date_header=False)
    with contextlib.suppress(KeyboardInterrupt):
        _Server(config).run(sockets=[listener])
