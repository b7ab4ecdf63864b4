"""Search over a corpus as an HTTP server.

In: a JSONL corpus, once; then queries. Out: passages, best first.

    python -m examples.search_agent.retrieval.server build CORPUS INDEX [--shard 0/2] [--embedding module:Class]
    python -m examples.search_agent.retrieval.server serve INDEX [INDEX …] [--mode bm25|vector|hybrid] [--port 8765]

    POST /search {"query": "…" or "queries": ["…", …], "k": 5} → {"results": [[{"id", "title", "text", "score"}, …], …]}
    GET /health → {"status", "passages", "digest", "mode", "queue", "queue_limit", "queries", "batches"}

A replica is the same command on another port or machine. Shards are built apart, by several processes or machines, and
given to one server together.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import to_json

from examples.search_agent.retrieval.batching import Batcher, QueueFull
from examples.search_agent.retrieval.embedding import HASHING
from examples.search_agent.retrieval.index import DEPTH, Mode, PassageIndex, build_index
from examples.search_agent.retrieval.passages import Passage

TOKEN_VARIABLE = "MILLRACE_SEARCH_TOKEN"

_MOST_BODY_BYTES = 2**20
_MOST_QUERY_CHARACTERS = 8192

cli = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


class SearchRequest(BaseModel):
    """Body of POST /search: one query, or several in one go."""

    model_config = ConfigDict(extra="forbid", strict=True)

    query: str | None = Field(default=None, max_length=_MOST_QUERY_CHARACTERS)
    queries: list[Annotated[str, Field(max_length=_MOST_QUERY_CHARACTERS)]] | None = Field(default=None, min_length=1)
    k: int = Field(default=5, ge=1, le=DEPTH)

    @model_validator(mode="after")
    def _one_of_both(self) -> SearchRequest:
        if (self.query is None) == (self.queries is None):
            raise ValueError('give either "query" or "queries"')
        return self

    @property
    def asked(self) -> list[tuple[str, int]]:
        """Queries with their k."""
        queries = [self.query] if self.query is not None else self.queries or []
        return [(query, self.k) for query in queries]


def create_app(
    index: PassageIndex, *, token: str = "", max_batch: int = 32, batch_seconds: float = 0.002, queue: int = 256
) -> FastAPI:
    """The server of an index. With a token, /search requires `Authorization: Bearer …`; /health never does."""
    batcher: Batcher[tuple[str, int], list[Passage]] = Batcher(
        index.search, most=max_batch, wait_seconds=batch_seconds, queue=queue
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with batcher:
            yield

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    async def search(request: Request) -> Response:
        if token and not hmac.compare_digest(
            request.headers.get("authorization", "").encode(), f"Bearer {token}".encode()
        ):
            return _error(401, f"send the server's {TOKEN_VARIABLE} as `Authorization: Bearer …`")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BODY_BYTES:
                return _error(413, f"the body is larger than {_MOST_BODY_BYTES} bytes")
        try:
            asked = SearchRequest.model_validate_json(bytes(body)).asked
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False, include_input=False)
            return _error(422, "; ".join(f"{'.'.join(map(str, f['loc']))} {f['msg']}".strip() for f in faults[:5]))
        if len(asked) > queue:
            return _error(422, f"{len(asked)} queries in one request, this server takes at most {queue}")
        try:
            results = await batcher(asked)
        except QueueFull as full:
            return _error(429, str(full), {"Retry-After": str(full.retry_after)})
        return _json({"results": results})

    # Not `@app.post`: there is nothing to inject, and looking for it costs CPU that the search needs.
    app.add_route("/search", search, methods=["POST"])

    @app.get("/health")
    async def health() -> Response:
        return _json(
            {
                "status": "ok",
                "passages": len(index),
                "digest": index.digest,
                "mode": index.mode,
                "embedding": index.manifests[0].embedding,
                "queue": batcher.queue_length,
                "queue_limit": queue,
                "queries": batcher.num_items,
                "batches": batcher.num_batches,
            }
        )

    return app


def _json(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status_code=status, headers=headers, media_type="application/json")


def _error(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    return _json({"error": reason}, status, headers)


@cli.command()
def build(
    corpus: Annotated[Path, typer.Argument(help="JSON lines: id, title, text.", exists=True, dir_okay=False)],
    index: Annotated[Path, typer.Argument(help="Folder to make; a build that was killed goes on.")],
    embedding: Annotated[str, typer.Option(help="`package.module:Class`; empty for BM25 alone.")] = HASHING,
    shard: Annotated[str, typer.Option(help="`0/2` is the first of two; build the others too.")] = "0/1",
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Leave broken lines out.")] = False,
) -> None:
    """Index a corpus."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    first, _, of = shard.partition("/")
    if not (first.isdigit() and of.isdigit()):
        raise typer.BadParameter(f"{shard!r} is not a shard; the first of two is 0/2", param_hint="--shard")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _named(), Progress(*columns) as bar:
        task = bar.add_task(f"indexing {corpus.name}", total=None)
        manifest = build_index(
            corpus,
            index,
            embedding=embedding,
            shard=(int(first), int(of)),
            skip_broken=skip_broken,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    left_out = f", {manifest.num_broken} broken lines left out" if manifest.num_broken else ""
    typer.echo(f"{index}: {manifest.num_passages} passages{left_out}, digest {manifest.digest}")


@cli.command()
def serve(
    indexes: Annotated[list[Path], typer.Argument(help="An index, or all shards of one.", exists=True)],
    host: Annotated[str, typer.Option(help=f"Not loopback: needs a token in {TOKEN_VARIABLE}.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8765,
    mode: Annotated[Mode | None, typer.Option(help="Default: hybrid if there are vectors.")] = None,
    embedding: Annotated[str, typer.Option(help="Refuse an index that was not built with this one.")] = "",
    max_batch: Annotated[int, typer.Option(min=1, help="Most queries worked on together.")] = 32,
    batch_ms: Annotated[float, typer.Option(min=0, help="Longest wait of a query for others.")] = 2.0,
    queue: Annotated[int, typer.Option(min=1, help="Queries that may wait; more are refused with 429.")] = 256,
) -> None:
    """Answer queries until interrupted."""
    import threadpoolctl  # type: ignore[import-untyped]
    import uvicorn

    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and not _is_loopback(host):
        raise typer.BadParameter(
            f"{host} can be reached by others: put a long random token into {TOKEN_VARIABLE}, here and for the clients",
            param_hint="--host",
        )
    with _named():
        index = PassageIndex(indexes, mode=mode, embedding=embedding)
    # The index cuts a product into threads itself. OpenBLAS's own spin for milliseconds after each product: a third of
    # the CPU a query takes.
    threadpoolctl.threadpool_limits(limits=1, user_api="blas")
    typer.echo(f"{len(index)} passages, digest {index.digest}, mode {index.mode}, at http://{host}:{port}")
    app = create_app(index, token=token, max_batch=max_batch, batch_seconds=batch_ms / 1000, queue=queue)
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False, proxy_headers=False)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Print an error of the input as a sentence, without a traceback."""
    try:
        yield
    except ValueError as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    cli()
