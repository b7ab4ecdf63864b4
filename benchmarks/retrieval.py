"""How fast the retrieval server of `examples/search_agent` answers, and whether it finds what an exact search finds.

In: nothing; a made corpus with Zipf's word frequencies. Out: a table, and JSON.

    python -m benchmarks.retrieval [--passages 100000] [--rate 500] [--connections 64] [--lancedb] [--json FILE]

Load comes over real HTTP from this process to a server in another one, in two ways. *Closed*: every connection asks
again as soon as it is answered, so the server is always full; by Little's law latency is connections / throughput.
*Open*: queries arrive at random moments (Poisson) at `--rate`, whatever the server does, and latency counts from the
arrival on, so that a slow answer does not hide the queries that wait behind it.

Recall compares the server's ten best with those of the formulas over all passages, in float64 and plain Python.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import psutil
import typer
from rich.table import Table

from cli.terminal.console import open_console
from examples.search_agent.retrieval.embedding import HashingEmbedding, unit_vectors, words_of
from examples.search_agent.retrieval.index import DEPTH, Mode, build_index
from examples.search_agent.retrieval.passages import Passage, read_passages

_VOCABULARY = 60_000
_K = 10


def make_corpus(file: Path, count: int, seed: int = 0) -> None:
    """Passages of 40 to 140 words; frequencies fall as 1/rank, and frequent words are short, as in any language."""
    draw = random.Random(seed)
    syllables = [a + b for a in "bcdfghklmnprstvz" for b in "aeiou"]
    words = [
        "".join(draw.choice(syllables) for _ in range(1 + min(3, rank // 200))) + draw.choice("nrst")
        for rank in range(_VOCABULARY)
    ]
    cumulative = np.cumsum(1 / np.arange(1, _VOCABULARY + 1))
    numbers = np.random.default_rng(seed)
    with open(file, "w") as out:
        for number in range(count):
            length = int(numbers.integers(40, 141))
            drawn = np.searchsorted(cumulative, numbers.random(length + 3) * cumulative[-1])
            text = " ".join(words[rank] for rank in drawn[3:])
            title = " ".join(words[rank] for rank in drawn[:3])
            out.write(json.dumps({"id": f"p{number}", "title": title, "text": text}) + "\n")


def make_queries(passages: Sequence[Passage], count: int, seed: int = 1) -> list[str]:
    """Each 5 to 12 words of some passage."""
    draw = random.Random(seed)
    texts = [draw.choice(passages).text.split() for _ in range(count)]
    return [" ".join(draw.sample(words, draw.randint(5, 12))) for words in texts]


class Connection:
    """One kept-open HTTP connection; a client library would cost the two cores more than the server does."""

    async def open(self, port: int) -> Connection:
        """Connect to loopback."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        return self

    async def search(self, query: str, k: int) -> tuple[int, bytes]:
        """Status and body."""
        body = json.dumps({"query": query, "k": k}).encode()
        self._writer.write(b"POST /search HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        return int(head.split()[1]), await self._reader.readexactly(length)


async def closed_load(port: int, queries: Sequence[str], *, connections: int, seconds: float) -> dict[str, float]:
    """Every connection asks without pause."""
    latencies: list[float] = []
    refused = 0
    started = time.perf_counter()

    async def client(number: int) -> None:
        nonlocal refused
        connection = await Connection().open(port)
        while (asked := time.perf_counter()) < started + seconds:
            status, _ = await connection.search(queries[(number := number + connections) % len(queries)], 5)
            latencies.append(time.perf_counter() - asked)
            refused += status != 200

    await asyncio.gather(*(client(number) for number in range(connections)))
    return _summary(latencies, refused, time.perf_counter() - started)


async def open_load(
    port: int, queries: Sequence[str], *, connections: int, seconds: float, rate: float
) -> dict[str, float]:
    """Queries arrive at `rate`; one that finds all connections in use waits for one, and that counts."""
    draw = random.Random(2)
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(connections):
        free.put_nowait(await Connection().open(port))
    latencies: list[float] = []
    tasks: list[asyncio.Task[None]] = []
    refused = 0

    async def client(query: str, arrived: float) -> None:
        nonlocal refused
        connection = await free.get()
        status, _ = await connection.search(query, 5)
        latencies.append(time.perf_counter() - arrived)
        refused += status != 200
        free.put_nowait(connection)

    started = arrival = time.perf_counter()
    while (arrival := arrival + draw.expovariate(rate)) < started + seconds:
        await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
        tasks.append(asyncio.create_task(client(queries[len(tasks) % len(queries)], arrival)))
    await asyncio.gather(*tasks)
    return _summary(latencies, refused, time.perf_counter() - started)


def _summary(latencies: Sequence[float], refused: int, seconds: float) -> dict[str, float]:
    cuts = statistics.quantiles(latencies, n=100)
    return {
        "queries_per_second": (len(latencies) - refused) / seconds,
        "p50_ms": 1000 * cuts[49],
        "p95_ms": 1000 * cuts[94],
        "p99_ms": 1000 * cuts[98],
        "refused": refused,
        "queries": len(latencies),
    }


class ExactSearch:
    """Every score of every passage for given queries, by the formulas, sharing no code with the index but words."""

    def __init__(self, passages: Sequence[Passage], queries: Sequence[str]) -> None:
        self._wanted = {word for query in queries for word in words_of(query)}
        self._has: dict[str, dict[int, int]] = {word: {} for word in self._wanted}
        self._lengths = []
        for row, passage in enumerate(passages):
            words = words_of(f"{passage.title}\n{passage.text}")
            self._lengths.append(len(words))
            for word, count in Counter(w for w in words if w in self._wanted).items():
                self._has[word][row] = count
        self._mean = sum(self._lengths) / len(self._lengths)
        texts = [f"{passage.title}\n{passage.text}" for passage in passages]
        self._vectors = unit_vectors(HashingEmbedding(), texts).astype(np.float64)

    def scores(self, query: str, mode: Mode) -> dict[int, float]:
        """Row → score."""
        match mode:
            case Mode.bm25:
                return self._bm25(query)
            case Mode.vector:
                return dict(enumerate(self._vectors @ unit_vectors(HashingEmbedding(), [query])[0].astype(np.float64)))
            case Mode.hybrid:
                fused: dict[int, float] = defaultdict(float)
                for one in (Mode.bm25, Mode.vector):
                    scores = self.scores(query, one)
                    for rank, row in enumerate(sorted(scores, key=lambda r: -scores[r])[:DEPTH], 1):
                        fused[row] += 1 / (60 + rank)
                return fused

    def _bm25(self, query: str) -> dict[int, float]:
        scores: dict[int, float] = defaultdict(float)
        for word in set(words_of(query)):
            rows = self._has[word]
            idf = math.log(1 + (len(self._lengths) - len(rows) + 0.5) / (len(rows) + 0.5))
            for row, count in rows.items():
                scores[row] += idf * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * self._lengths[row] / self._mean))
        return scores


def recall(exact: ExactSearch, port: int, passages: Sequence[Passage], queries: Sequence[str], mode: Mode) -> float:
    """Share of the server's ten best that reach the exact tenth-best score, so that equal scores are equally right."""
    row_of = {passage.id: row for row, passage in enumerate(passages)}
    shares = []
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        for query in queries:
            scores = exact.scores(query, mode)
            due = sorted(scores.values(), reverse=True)[:_K]
            (matches,) = client.post("/search", json={"query": query, "k": _K}).json()["results"]
            right = sum(scores.get(row_of[row["id"]], 0.0) >= due[-1] - 1e-6 for row in matches)
            shares.append(right / len(due))
    return statistics.mean(shares)


async def lancedb_rates(folder: Path, queries: Sequence[str]) -> dict[str, float]:
    """Queries per second of LanceDB's own full-text and exact vector search, 16 at a time, over the same table."""
    import lancedb
    from lancedb.index import FTS

    table = await (await lancedb.connect_async(str(folder.resolve()))).open_table("passages")
    words = FTS(base_tokenizer="simple", stem=False, remove_stop_words=False, with_position=False)
    await table.create_index("text", config=words)
    vectors = unit_vectors(HashingEmbedding(), queries)
    gate = asyncio.Semaphore(16)

    async def text(number: int) -> None:
        async with gate:
            await (
                table.query()
                .nearest_to_text(queries[number], columns=["text"])
                .limit(_K)
                .select(["id", "_score"])
                .to_arrow()
            )

    async def vector(number: int) -> None:
        async with gate:
            search = table.query().nearest_to(vectors[number]).distance_type("dot")
            await search.limit(_K).select(["id", "_distance"]).to_arrow()

    rates = {}
    for name, one, count in (("text", text, 400), ("vector", vector, 40)):
        await one(0)
        started = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(count)))
        rates[name] = count / (time.perf_counter() - started)
    return rates


def measure(
    mode: Mode, index: Path, passages: Sequence[Passage], queries: Sequence[str], **load: Any
) -> dict[str, Any]:
    """Serve the index, warm up, and load it in both ways."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "examples.search_agent.retrieval.server", "serve", str(index)]
    started = time.perf_counter()
    server = subprocess.Popen([*command, "--port", str(port), "--mode", mode], stdout=subprocess.DEVNULL)
    try:
        while True:
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with {server.returncode}")
            try:
                httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        start_seconds = time.perf_counter() - started
        rate, seconds, connections = load["rate"], load["seconds"], load["connections"]
        asyncio.run(closed_load(port, queries, connections=connections, seconds=2))
        used = psutil.Process(server.pid).cpu_times()
        opened = asyncio.run(open_load(port, queries, connections=connections, seconds=seconds, rate=rate))
        cpu = psutil.Process(server.pid).cpu_times()
        return {
            "start_seconds": start_seconds,
            "closed": asyncio.run(closed_load(port, queries, connections=connections, seconds=seconds)),
            "open": opened,
            "cpu_ms_per_query": 1000 * (cpu.user + cpu.system - used.user - used.system) / opened["queries"],
            "recall_at_10": recall(load["exact"], port, passages, queries[: load["judged"]], mode),
            "memory_gb": psutil.Process(server.pid).memory_info().rss / 1e9,
        }
    finally:
        server.terminate()
        server.wait()


def main(
    passages: Annotated[int, typer.Option(min=1000)] = 100_000,
    rate: Annotated[float, typer.Option(min=1, help="Arrivals a second of the open loop.")] = 500,
    connections: Annotated[int, typer.Option(min=1)] = 64,
    seconds: Annotated[float, typer.Option(min=1, help="Length of each load.")] = 10,
    judged: Annotated[int, typer.Option(min=1, help="Queries compared with the exact search.")] = 100,
    lancedb: Annotated[bool, typer.Option("--lancedb", help="Measure LanceDB's own search too.")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Make a corpus, index it, and measure a server of it in each mode."""
    with tempfile.TemporaryDirectory() as scratch:
        corpus, index = Path(scratch, "corpus.jsonl"), Path(scratch, "index")
        make_corpus(corpus, passages)
        started = time.perf_counter()
        build_index(corpus, index)
        numbers: dict[str, Any] = {
            "passages": passages,
            "build_passages_per_second": passages / (time.perf_counter() - started),
            "cores": os.cpu_count(),
            "load_at_start": os.getloadavg()[0],
            "modes": {},
        }
        held = list(read_passages(corpus))
        queries = make_queries(held, 2000)
        load = {"rate": rate, "seconds": seconds, "connections": connections, "judged": judged}
        exact = ExactSearch(held, queries[:judged])
        for mode in Mode:
            numbers["modes"][mode] = measure(mode, index, held, queries, exact=exact, **load)
        if lancedb:
            numbers["lancedb_queries_per_second"] = asyncio.run(lancedb_rates(index, queries))
    _show(numbers, rate, connections)
    if output:
        output.write_text(json.dumps(numbers, indent=1) + "\n")


def _show(numbers: dict[str, Any], rate: float, connections: int) -> None:
    table = Table(
        title=f"{numbers['passages']} passages built at {numbers['build_passages_per_second']:.0f}/s; "
        f"{numbers['cores']} cores, load {numbers['load_at_start']:.1f} at start"
    )
    table.add_column("mode")
    for column in (
        f"open loop, {rate:g}/s: served/s",
        "p50",
        "p95",
        "p99 ms",
        "refused",
        f"closed loop, {connections}: served/s",
        "p95 ms",
        "CPU ms/query",
        "recall@10",
        "memory",
        "start",
    ):
        table.add_column(column, justify="right")
    for mode, made in numbers["modes"].items():
        opened, closed = made["open"], made["closed"]
        table.add_row(
            str(mode),
            f"{opened['queries_per_second']:.0f}",
            *(f"{opened[key]:.0f}" for key in ("p50_ms", "p95_ms", "p99_ms", "refused")),
            f"{closed['queries_per_second']:.0f}",
            f"{closed['p95_ms']:.0f}",
            f"{made['cpu_ms_per_query']:.2f}",
            f"{made['recall_at_10']:.4f}",
            f"{made['memory_gb']:.2f} GB",
            f"{made['start_seconds']:.1f} s",
        )
    open_console().print(table)
    if rates := numbers.get("lancedb_queries_per_second"):
        open_console().print(
            f"LanceDB's own search, in this process: text {rates['text']:.0f}/s, exact vectors {rates['vector']:.0f}/s"
        )


if __name__ == "__main__":
    typer.run(main)
