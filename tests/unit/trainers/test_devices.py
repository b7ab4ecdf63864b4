"""What a step needs stands where it is needed: on the device, or on the host, and never on the wrong one.

A machine without a GPU shows it with torch's `meta` device, which refuses operands of two devices as a GPU does; with
a GPU, whole steps are taken there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.utils import _to_kwargs

from tests.unit.trainers.builders import take_step, trainer_of, weights
from trainers.checkpoint import load_state, save_state
from trainers.critic import CriticModel
from trainers.data.samples import Samples
from trainers.model import attention
from trainers.model.batches import build_pack
from trainers.model.distributed import device_bytes, peak_flops
from trainers.model.experts import Routed
from trainers.model.model import load_model

_META = torch.device("meta")
_HAS_GPU = torch.cuda.is_available()


def _pack_on_meta(samples: Samples) -> Any:
    pack = build_pack(samples, np.arange(samples.num_rows), mask_T=samples.mask_T, values={}, device=_META)
    assert pack.layout.computed_T is not None, "attempts share their prompt"
    return pack


@pytest.mark.parametrize("has_flash_kernel", [False, True])
@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_a_forward_and_a_backward_pass_mix_no_devices(
    tiny_folder: Path, samples: Samples, kind: str, has_flash_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And torch's own kernel takes what it is given: its checks of arguments run on `meta`, too."""
    pack = _pack_on_meta(samples)
    model = load_model(tiny_folder, dtype=torch.bfloat16, activation_checkpointing=True).to(_META)
    monkeypatch.setattr(attention, "_has_flash_kernel", lambda query: has_flash_kernel)
    if kind == "policy":
        named = {"positions_N": pack.positions, "entropy_grad": True}
        arguments = (pack.input_ids, pack.targets, pack.position_ids, pack.layout, 1.0)
        parts = model
    else:
        named, arguments = {}, (pack.input_ids, pack.position_ids, pack.layout)
        parts = CriticModel(model).to(_META)
    # As FSDP does to a model on a GPU before its forward: what is a tensor goes to the device.
    (moved,), (moved_named,) = _to_kwargs(arguments, named, _META, False)
    found = parts(*moved, **moved_named)
    total = sum(output.sum() for output in (found if isinstance(found, tuple) else (found,)))
    assert total.device == _META
    total.backward()
    assert all(p.grad is not None and p.grad.device == _META for p in parts.parameters() if p.requires_grad)


@pytest.mark.parametrize("settings", [{}, {"ema": 0.9}, {"advantage": "gae"}, {"offload_optimizer": True}], ids=str)
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not _HAS_GPU, reason="no GPU")])]
)
def test_a_trainer_that_left_its_device_and_came_back_goes_on_as_one_that_stayed(
    tiny_folder: Path, samples: Samples, device: str, settings: dict[str, Any]
) -> None:
    """On a CPU it goes nowhere, and what is moved is the same."""
    if device == "cpu" and "offload_optimizer" in settings:
        pytest.skip("there is nothing to offload from")
    stays, leaves = (trainer_of(tiny_folder, device=device, **settings) for _ in range(2))
    for step in (1, 2):
        leaves.free_gradients()
        leaves.move(torch.device("cpu"))
        held = [*leaves.model.parameters(), *(v for s in leaves.optimizer.state.values() for v in s.values())]
        assert {tensor.device.type for tensor in held if isinstance(tensor, torch.Tensor)} == {"cpu"}
        leaves.move(leaves.device)
        expected, found = (take_step(each, samples, step=step, max_staleness=9) for each in (stays, leaves))
        assert found == pytest.approx(expected, rel=1e-5 if device == "cuda" else 0)
    assert leaves.optimizer.state, "AdamW has its moments"
    for name, weight in weights(leaves).items():
        assert torch.allclose(weight, weights(stays)[name], atol=1e-6 if device == "cuda" else 0), name


def test_a_trainer_that_leaves_gives_back_all_that_it_let_go_of(
    tiny_folder: Path, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator keeps what is let go of after it was asked to give it back."""
    trainer = trainer_of(tiny_folder, ema=0.9)
    take_step(trainer, samples)
    trainer.model.routers.seen = [Routed(torch.zeros(3, 4), torch.zeros(3, 2))]
    assert trainer.ema is not None
    before, given_back = set(map(id, trainer.ema._average.values())), []

    def empty_cache() -> None:
        assert trainer.ema is not None
        moved = before.isdisjoint(map(id, trainer.ema._average.values()))
        given_back.append((moved, trainer.model.routers.seen))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_: tensor.detach().clone())  # as to another device
    trainer.move(torch.device("cpu"))
    assert given_back == [(True, [])]


def test_each_step_reports_its_own_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [5, 3]
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: max(held))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: held.remove(max(held)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10, 80))
    reported = [device_bytes(torch.device("cuda", 0)) for _ in range(2)]
    assert reported == [{"trainer_gpu_bytes": 5.0, "gpu_bytes": 70.0}, {"trainer_gpu_bytes": 3.0, "gpu_bytes": 70.0}]
    assert device_bytes(torch.device("cpu")) == {}


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA H20", 148),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str, tera: int | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda", 0)) == (None if tera is None else tera * 1e12)
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"offload_optimizer": True},
        {"offload_activations": True},
        {"advantage": "gae"},
        {"compile": True},
    ],
    ids=str,
)
def test_a_step_on_a_gpu_is_that_of_the_cpu_and_goes_on_after_a_resume(
    tiny_folder: Path, samples: Samples, tmp_path: Path, settings: dict[str, Any]
) -> None:
    on_cpu = trainer_of(tiny_folder, device="cpu", **{k: v for k, v in settings.items() if k == "advantage"})
    expected = take_step(on_cpu, samples)
    trainer = trainer_of(tiny_folder, device="cuda", **settings)
    found = take_step(trainer, samples)
    tolerance = 5e-2 if settings.get("dtype") == "bfloat16" else 1e-3
    for name in ("loss", "entropy", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance)
    save_state(trainer, tmp_path / "state", step=1)
    take_step(trainer, samples, step=2, max_staleness=9)
    resumed = trainer_of(tiny_folder, device="cuda", **settings)
    assert load_state(resumed, tmp_path / "state") == 1
    take_step(resumed, samples, step=2, max_staleness=9)
    for name, weight in weights(resumed).items():
        # A hundredth of an update: the order in which a GPU adds up is not always the same.
        assert (weight - weights(trainer)[name]).abs().mean() < 1e-5, name
