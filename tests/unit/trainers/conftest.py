"""A tiny model and its attempts for all trainer tests, and one thread: at this size a second one only waits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.unit.trainers.builders import Row, random_rows, samples_of, tiny_model
from trainers.data.samples import Samples


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sealed model folder; read it, never write to it."""
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def rows(tiny_folder: Path) -> list[Row]:
    return random_rows(tiny_folder)


@pytest.fixture(scope="module")
def samples(rows: list[Row]) -> Samples:
    return samples_of(rows)


@pytest.fixture(scope="session", autouse=True)
def _one_thread_and_one_process_group() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()
