"""How many bytes and seconds a policy costs from trainer to engine: whole, and as what changed since its anchor.

In: nothing; a random model, really trained. Out: a table, and JSON.

    python -m benchmarks.publish [--millions 75] [--policies 9] [--learning-rate 1e-6] [--s3] [--json FILE]

Weights in bfloat16, rounded from float32 masters that torch's AdamW moves by gradients of fixed size and random sign,
from a run's start (the first, largest steps: Adam's update is then ±learning rate). Weights have the standard deviation
0.02 of the usual initialisation. `save` is from the trainer's whole folder to the last byte in the store; `fetch` from
there to a verified folder an engine can load, in a cache that has the anchor, as it does from the second delta on.
With --s3 the store is a mock S3 server on this machine (moto): its seconds show the order, not a network.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from safetensors.torch import save_file

from cli.terminal.console import open_console
from storage.log.entries import Claim, Policy, Session, Step
from storage.log.runs import create_run
from storage.objects.digests import seal_folder, verify_folder
from storage.objects.object_store import ObjectStore
from storage.objects.opening import open_store
from storage.policies.policies import PolicyReader, PolicyWriter

WIDTH = 1024


class Masters:
    """float32 weights and their optimizer; what is published is their bfloat16 rounding."""

    def __init__(self, millions: float, *, learning_rate: float) -> None:
        self._random = torch.Generator().manual_seed(0)
        layers = max(1, round(millions * 1e6 / WIDTH / WIDTH / 4))
        shapes = {f"layers.{n}.weight": (4 * WIDTH, WIDTH) for n in range(layers)} | {"norm.weight": (WIDTH,)}
        self.parameters = {
            name: torch.nn.Parameter(0.02 * torch.randn(shape, generator=self._random))
            for name, shape in shapes.items()
        }
        self._optimizer = torch.optim.AdamW(self.parameters.values(), lr=learning_rate, weight_decay=0.0)

    def step(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=self._random)
        self._optimizer.step()

    def save(self, folder: Path) -> str:
        """A sealed policy folder; returns its weights digest."""
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        weights = {name: parameter.detach().bfloat16() for name, parameter in self.parameters.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return seal_folder(folder)

    @property
    def num_values(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())


def publish(
    store: ObjectStore, masters: Masters, scratch: Path, *, policies: int, anchor_every: int
) -> list[dict[str, Any]]:
    """What each policy cost; the anchor before them is not counted if there are deltas."""
    log = create_run(store, f"run-{anchor_every}", {})
    log.append(Session(id="first", code_version=""))
    log.append(Policy(version=0, path="models/base", weights_sha256="", parent=None))
    writer = PolicyWriter(log, scratch / "trainer-cache", anchor_every=anchor_every)
    reader = PolicyReader(log, scratch / "engine-cache")
    publications: list[dict[str, Any]] = []
    for version in range(1, policies + 2):
        masters.step()
        folder = scratch / f"{anchor_every}-{version}"
        digest, path = masters.save(folder), log.key(f"policies/{version}-a")
        started = time.perf_counter()
        anchor, written = writer.put(folder, path, version=version)
        saved = time.perf_counter()
        policy = Policy(version=version, path=path, weights_sha256=digest, parent=version - 1, anchor=anchor)
        claim = Claim(step=version, base_version=version - 1, trained=[], stale=[], filtered=[], failed=[])
        step = Step(claim=claim, policy=policy, shard_sha256={}, metrics={}, state_path=None, session_id="first")
        log.append(step)
        logged = time.perf_counter()
        fetched = reader.fetch(policy)
        publications.append(
            {
                "is_delta": anchor is not None,
                "bytes": int(written["policy_bytes"]),
                "changed_fraction": written.get("policy_changed_fraction"),
                "save_seconds": saved - started,
                "fetch_seconds": time.perf_counter() - logged,
            }
        )
        assert verify_folder(fetched) == digest, "bit for bit"
        for file in folder.iterdir():
            file.unlink()
    return publications[1:]


@contextmanager
def mock_s3() -> Iterator[str]:
    """The URI of a bucket on a server in this process."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line per request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    access = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(access, AWS_ENDPOINT_URL=f"http://{host}:{port}", AWS_EC2_METADATA_DISABLED="true")
    try:
        boto3.client("s3").create_bucket(Bucket="lake")
        yield "s3://lake/store"
    finally:
        server.stop()


def summarise(publications: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over policies; the share of values changed by the first and the last, which grows with the distance."""
    keys = ("bytes", "save_seconds", "fetch_seconds")
    result = {key: statistics.median(policy[key] for policy in publications) for key in keys}
    shares = [policy["changed_fraction"] for policy in publications if policy["is_delta"]]
    if shares:
        result |= {"changed_fraction_first": shares[0], "changed_fraction_last": shares[-1]}
    return {**result, "num_deltas": len(shares)}


def main(
    millions: Annotated[float, typer.Option(help="Parameters of the model, in millions.")] = 75,
    policies: Annotated[int, typer.Option(help="Policies measured, after the anchor.")] = 9,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-6,
    s3: Annotated[bool, typer.Option("--s3", help="Also through a mock S3 server.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Measure and print."""
    torch.manual_seed(0)
    results: dict[str, Any] = {}
    num_values = 0
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millrace-publish-")))
        uris = {"folder": str(scratch / "store")} | ({"mock S3": stack.enter_context(mock_s3())} if s3 else {})
        for where, uri in uris.items():
            for kind, anchor_every in (("whole", 1), ("delta", policies + 1)):
                place = scratch / f"{kind}-{where.replace(' ', '')}"
                place.mkdir()
                masters = Masters(millions, learning_rate=learning_rate)
                num_values = masters.num_values
                costs = publish(open_store(uri), masters, place, policies=policies, anchor_every=anchor_every)
                results.setdefault(where, {})[kind] = summarise(costs)
    table = Table(
        title=f"{num_values / 1e6:.0f} M values, bfloat16, learning rate {learning_rate}: medians of {policies}"
    )
    for column in ("store", "bytes, whole : delta", "whole MB", "delta MB", "changed", "save s", "fetch s"):
        table.add_column(column, justify="right")
    for where, both in results.items():
        whole, delta = both["whole"], both["delta"]
        both["bytes_ratio"] = whole["bytes"] / delta["bytes"]
        changed = (
            [100 * delta[f"changed_fraction_{end}"] for end in ("first", "last")] if delta["num_deltas"] else [0, 0]
        )
        table.add_row(
            where,
            f"{both['bytes_ratio']:.1f} : 1",
            f"{whole['bytes'] / 1e6:.1f}",
            f"{delta['bytes'] / 1e6:.2f}",
            f"{changed[0]:.2f} … {changed[1]:.2f} %",
            f"{whole['save_seconds']:.2f} : {delta['save_seconds']:.2f}",
            f"{whole['fetch_seconds']:.2f} : {delta['fetch_seconds']:.2f}",
        )
    open_console().print(table)
    if json_file is not None:
        settings = {"num_values": num_values, "dtype": "bfloat16", "learning_rate": learning_rate, "policies": policies}
        json_file.write_text(json.dumps({"settings": settings, "stores": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
