"""The GPUs of this machine, as the kernel and the driver's program list them."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import devices
from infra.devices import gpu_memory, num_gpus
from infra.ray.client import nodes_to_use


@pytest.mark.parametrize(
    ("listed", "says", "visible", "expected"),
    [
        (2, "exit 9", None, 2),
        (2, "exit 9", "1", 1),
        (
            0,
            "printf '0, GPU-a, 24576, 24000\\n1, GPU-b, 81920, 500\\n'",
            None,
            2,
        ),  # a sandbox without the kernel's list
        (0, "printf '0, GPU-a, 24576, 24000\\n1, GPU-b, 81920, 500\\n'", "GPU-b", 1),
        (0, "printf '0, GPU-a, [N/A], [N/A]\\n'", None, 0),  # its memory is the CPU's
        (1, "printf '0, GPU-a, [N/A], [N/A]\\n'", None, 1),
        (0, "echo NVIDIA-SMI has failed because it could not communicate with the driver; exit 9", None, 0),
        (0, "exec tail -f /dev/null", None, 0),  # a card that hangs
    ],
)
def test_gpus_are_counted_by_the_kernel_s_list_or_else_by_the_driver_s_program(
    listed: int, says: str, visible: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gpus"
    for number in range(listed):
        (folder / f"0000:0{number}:00.0").mkdir(parents=True)
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)
    monkeypatch.setattr(devices, "_LISTED_GPUS", folder)
    monkeypatch.setattr(devices, "_SECONDS_TO_LIST", 0.2 if "tail" in says else 30.0)
    monkeypatch.setattr(devices, "_ELSEWHERE", str(tmp_path))  # and not on PATH, as in some containers
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert num_gpus() == expected
    assert nodes_to_use()[0].get("GPU", 0.0) == expected
    assert len(gpu_memory()) == (0 if listed or "GPU-a, 24576" not in says else expected)
