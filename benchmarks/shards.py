"""How fast shards are written and read back, next to what one would otherwise use, on the same rows.

In: a number of rows and the URIs of stores. Out: tables on the terminal, ratios first, and the same numbers as JSON.

    python -m benchmarks.shards [--rows 2048] [--store s3://bucket/prefix] [--json FILE]

Each format starts from the Python records a rollout worker holds (`workloads/trajectories.py`), writes one durable
file on the local disk, and reads it back from the page cache into flat arrays for the trainer. Ours is committed
through a run's log as well, and read with digest and rules checked. Medians of several repetitions.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.run_log import delete_run
from benchmarks.workloads.trajectories import ATTEMPTS, make_groups, moved, plain_rows, provenance_of
from cli.terminal.console import open_console
from storage.log.entries import ClaimedGroup
from storage.log.run_log import RunLog
from storage.log.runs import create_run
from storage.objects.opening import open_store
from storage.records import RolloutGroup, Sampling
from storage.shards.codec import shard_table
from storage.shards.schema import flat
from storage.shards.shards import commit_shard, read_shard
from trainers.data.samples import COLUMNS, gather_samples

REPETITIONS = 7
TOKEN_COLUMNS = {"input_ids": np.int32, "loss_mask": np.bool_, "logprobs": np.float32, "weight_versions": np.int32}
"""What the trainer gets: 13 bytes per token. GB/s below are of these, whatever the file holds."""
MEMORY_ROWS = 2048
MEMORY_SHARDS = (1, 50)


class Cost(NamedTuple):
    """What one action took. On a busy machine the processor's time is the steadier of the two."""

    seconds: float
    cpu_seconds: float
    """Processor time of all threads of this process."""


def ours(uri: str, groups: list[RolloutGroup]) -> dict[str, Any]:
    """Shards through the log of a run, which is deleted at the end."""
    store, run_id = open_store(uri), f"benchmark-{uuid.uuid4().hex[:8]}"
    try:
        return _committed(create_run(store, run_id, {}), groups)
    finally:
        delete_run(store, run_id)


def _committed(log: RunLog, groups: list[RolloutGroup]) -> dict[str, Any]:
    pending = iter([(number, moved(groups, number)) for number in range(REPETITIONS + 1)])

    def write() -> Any:
        number, fresh = next(pending)
        return commit_shard(log, fresh, provenance=provenance_of(f"{number}", run_id=log.run_id), sampling=Sampling())

    written, shard = _timed(write)
    claimed = [ClaimedGroup(shard_id=shard.id, group_id=group.id) for group in shard.groups]

    def read() -> int:
        samples = gather_samples(claimed, {shard.id: read_shard(log, shard, columns=COLUMNS)})
        return sum(a.nbytes for a in (samples.input_ids_T, samples.mask_T, samples.logprobs_T, samples.versions_T))

    return _result(written, shard.num_bytes, *_timed(read))


def as_json(
    folder: Path, groups: list[RolloutGroup], dumps: Callable[[Any], bytes], loads: Callable[[bytes], Any]
) -> dict[str, Any]:
    """One JSON object per line."""

    def write(path: Path) -> None:
        with open(path, "wb") as file:
            for row in plain_rows(groups):
                file.write(dumps(row) + b"\n")
            os.fsync(file.fileno())

    def read(path: Path) -> int:
        with open(path, "rb") as file:
            return _flattened([loads(line) for line in file])

    return _file_format(folder, write, read)


def as_pickle(folder: Path, groups: list[RolloutGroup]) -> dict[str, Any]:
    """The same plain rows, pickled. Reading it runs whatever code the file names; nothing else here does."""

    def write(path: Path) -> None:
        with open(path, "wb") as file:
            pickle.dump(list(plain_rows(groups)), file, protocol=5)
            os.fsync(file.fileno())

    return _file_format(folder, write, lambda path: _flattened(pickle.loads(path.read_bytes())))


def as_parquet(folder: Path, groups: list[RolloutGroup]) -> dict[str, Any]:
    """Our table in Parquet, zstd."""

    def write(path: Path) -> None:
        with open(path, "wb") as file:
            pq.write_table(_table(groups), file, compression="zstd")
            os.fsync(file.fileno())

    return _file_format(folder, write, lambda path: _gathered(pq.read_table(path, columns=list(COLUMNS))))


def as_lance(folder: Path, groups: list[RolloutGroup]) -> dict[str, Any]:
    """Our table as a Lance data set, but for the columns of types it does not know. It does not wait for the disk."""
    import lance

    def write(path: Path) -> None:
        table = _table(groups).drop_columns(["reward_parts", "multimodal_features", "multimodal_positions"])
        lance.write_dataset(table, str(path))

    return _file_format(folder, write, lambda path: _gathered(lance.dataset(str(path)).to_table(columns=list(COLUMNS))))


def _file_format(folder: Path, write: Callable[[Path], None], read: Callable[[Path], int]) -> dict[str, Any]:
    """Every time another file, as every shard is one: to write over a file that is in the page cache is cheaper."""
    paths = [folder / uuid.uuid4().hex for _ in range(REPETITIONS + 1)]
    pending = iter(paths)
    written, _ = _timed(lambda: write(next(pending)))
    files = [file for file in [paths[-1], *paths[-1].rglob("*")] if file.is_file()]
    return _result(written, sum(file.stat().st_size for file in files), *_timed(lambda: read(paths[-1])))


def encodings(folder: Path, groups: list[RolloutGroup]) -> dict[str, dict[str, Any]]:
    """The finished table in every encoding we might have chosen."""
    table = _table(groups)
    strings = ["group_id", "prompt_id", "reject_reason", "status", "worker_id"]
    variants: dict[str, tuple[pa.Table, Any]] = {
        "none": (table, None),
        "lz4": (table, "lz4"),
        **{f"zstd {level}": (table, pa.Codec("zstd", compression_level=level)) for level in (-3, 1, 3, 9)},
        "lz4, strings as dictionaries": (_with(table, strings, lambda column: column.dictionary_encode()), "lz4"),
        "lz4, versions as differences": (_with(table, ["weight_versions"], _differences), "lz4"),
        "lz4, logprobs as split bytes": (_with(table, ["logprobs"], _split_bytes), "lz4"),
        "zstd 1, logprobs as split bytes": (_with(table, ["logprobs"], _split_bytes), "zstd"),
    }
    path = folder / "encoded.arrow"

    def write(content: pa.Table, codec: Any) -> None:
        options = pa.ipc.IpcWriteOptions(compression=codec)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, content.schema, options=options) as writer:
            writer.write_table(content)

    def read() -> int:
        with pa.memory_map(str(path)) as mapped:
            content = pa.ipc.open_file(mapped.read_buffer()).read_all()
        return sum(flat(content[name]).nbytes for name in TOKEN_COLUMNS)

    results = {}
    for name, (content, codec) in variants.items():
        written, _ = _timed(lambda content=content, codec=codec: write(content, codec))  # type: ignore[misc]
        results[name] = _result(written, path.stat().st_size, *_timed(read))
    return results


def memory(num_shards: int) -> dict[str, float]:
    """Bytes above the trajectories themselves while writing shards one after another. For a process of its own."""
    empty = _resident("VmRSS")
    groups = make_groups(MEMORY_ROWS)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of making them
    with tempfile.TemporaryDirectory() as folder:
        log = create_run(open_store(folder), "benchmark", {})
        for number in range(num_shards):
            provenance = provenance_of(f"{number}")
            commit_shard(log, moved(groups, number), provenance=provenance, sampling=Sampling())
    return {
        "peak_bytes": _resident("VmHWM") - before,
        "records_bytes": before - empty,
        "column_bytes": float(_table(groups).nbytes),
    }


def measure(rows: int, stores: Sequence[str]) -> dict[str, Any]:
    """Everything, as the JSON it is saved as."""
    groups = make_groups(rows)
    plain = json.JSONEncoder(separators=(",", ":")).encode
    with tempfile.TemporaryDirectory(prefix="millrace-") as scratch:
        folder = Path(scratch)
        formats = {
            "shard, committed": ours(str(folder / "store"), groups),
            "JSONL": as_json(folder, groups, lambda row: plain(row).encode(), json.loads),
            "pickle": as_pickle(folder, groups),
            "Parquet": as_parquet(folder, groups),
            "Lance, without fsync": as_lance(folder, groups),
        }
        if importlib.util.find_spec("orjson"):
            orjson = importlib.import_module("orjson")
            formats["JSONL by orjson"] = as_json(folder, groups, orjson.dumps, orjson.loads)
        encoded = encodings(folder, groups)
    peaks = {}
    for num_shards in MEMORY_SHARDS:
        command = [sys.executable, "-m", "benchmarks.shards", "--memory", str(num_shards)]
        peaks[f"{num_shards} shards"] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {
        "rows": rows,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "pyarrow": pa.__version__},
        "formats": formats,
        "stores": {uri: {"server": _server(uri), **ours(uri, groups)} for uri in stores},
        "encodings": encoded,
        "memory": peaks,
    }


def show(numbers: dict[str, Any], console: Console) -> None:
    """Ratios first, then what they are of."""
    jsonl, rows = numbers["formats"]["JSONL"], numbers["rows"]
    stores = {f"shard on {uri} ({found['server']})": found for uri, found in numbers["stores"].items()}
    for title, results in (
        ("Written from Python records, durable; read into the trainer's arrays", {**numbers["formats"], **stores}),
        ("Encodings of the finished table, without digests", numbers["encodings"]),
    ):
        table = Table(title=f"{title} ({rows} rows of 1,000 tokens)", title_justify="left")
        for column in ("", "write time / JSONL", "bytes / JSONL", "rows/s", "rows/CPU s", "bytes/row", "read GB/s"):
            table.add_column(column, justify="left" if not column else "right")
        for name, found in results.items():
            table.add_row(
                name,
                f"1/{jsonl['write_seconds'] / found['write_seconds']:.1f}",
                f"{found['bytes'] / jsonl['bytes']:.3f}",
                f"{rows / found['write_seconds']:,.0f}",
                f"{rows / found['write_cpu_seconds']:,.0f}",
                f"{found['bytes'] / rows:,.0f}",
                f"{found['sample_bytes'] / found['read_seconds'] / 1e9:.2f}",
            )
        console.print(table)
    if "JSONL by orjson" not in numbers["formats"]:
        console.print("JSONL by orjson was left out: orjson is not installed")
    for name, found in numbers["memory"].items():
        console.print(
            f"memory for writing {name}: {found['peak_bytes'] / found['records_bytes']:.1f} × what the trajectories of "
            f"one are as Python objects ({found['records_bytes'] / 1e6:.0f} MB), "
            f"{found['peak_bytes'] / found['column_bytes']:.1f} × its columns"
        )


def _timed(action: Callable[[], Any]) -> tuple[Cost, Any]:
    """Median cost of an action, after a first time that does not count, and its last result."""
    seconds, cpu_seconds = [], []
    for _ in range(REPETITIONS + 1):
        started, cpu_started = time.perf_counter(), time.process_time()
        result = action()
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
    return Cost(statistics.median(seconds[1:]), statistics.median(cpu_seconds[1:])), result


def _result(write: Cost, num_bytes: int, read: Cost, sample_bytes: int) -> dict[str, Any]:
    return {
        "write_seconds": write.seconds,
        "write_cpu_seconds": write.cpu_seconds,
        "bytes": num_bytes,
        "read_seconds": read.seconds,
        "read_cpu_seconds": read.cpu_seconds,
        "sample_bytes": sample_bytes,
    }


def _table(groups: list[RolloutGroup]) -> pa.Table:
    return shard_table(groups, provenance=provenance_of("0"), sampling=Sampling())


def _gathered(table: pa.Table) -> int:
    """A table into the trainer's arrays, rows in file order; returns their bytes."""
    return sum(flat(table[name]).nbytes for name in TOKEN_COLUMNS)


def _flattened(rows: list[dict[str, Any]]) -> int:
    """Plain rows into the trainer's arrays; returns their bytes."""
    return sum(np.concatenate([np.array(r[name], kind) for r in rows]).nbytes for name, kind in TOKEN_COLUMNS.items())


def _with(table: pa.Table, names: Sequence[str], change: Callable[[pa.ChunkedArray], Any]) -> pa.Table:
    for name in names:
        table = table.set_column(table.schema.get_field_index(name), name, change(table[name]))
    return table


def _differences(column: pa.ChunkedArray) -> pa.Array:
    return pa.ListArray.from_arrays(column.chunk(0).offsets, np.diff(flat(column), prepend=np.int32(0)))


def _split_bytes(column: pa.ChunkedArray) -> pa.Array:
    """All first bytes, then all second bytes and so on, in a column of the same size."""
    split = np.ascontiguousarray(flat(column).view(np.uint8).reshape(-1, 4).T).view(np.int32).ravel()
    return pa.ListArray.from_arrays(column.chunk(0).offsets, split)


def _resident(key: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return float(line.split()[1]) * 1024


def _server(uri: str) -> str:
    """What answers behind an S3 URI, as it calls itself."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    if not uri.startswith("s3://"):
        return "file system"
    if not endpoint:
        return "AWS"
    try:
        with urllib.request.urlopen(endpoint) as answer:
            return answer.headers.get("Server") or "unnamed server"
    except urllib.error.HTTPError as refused:
        return refused.headers.get("Server") or "unnamed server"


def main(
    rows: Annotated[
        int, typer.Option(min=ATTEMPTS, help=f"trajectories of 1,000 tokens in the shard, a multiple of {ATTEMPTS}")
    ] = 2048,
    store: Annotated[
        list[str] | None, typer.Option(help="URI of a store to commit to as well; several are fine")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="where to save the numbers")] = None,
    memory_of: Annotated[int, typer.Option("--memory", hidden=True)] = 0,
) -> None:
    """Measure, print, and save when asked."""
    if memory_of:
        print(json.dumps(memory(memory_of)))
        return
    if rows % ATTEMPTS:
        raise typer.BadParameter(f"--rows {rows}: groups have {ATTEMPTS} attempts; give a multiple of {ATTEMPTS}")
    numbers = measure(rows, store or [])
    show(numbers, open_console())
    if json_file:
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
