"""A delta and its anchor give the other file again, byte for byte, whatever the weights are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_tensors

from storage.objects.digests import DigestMismatch
from storage.policies import deltas
from storage.policies.deltas import apply_delta, read_about, write_delta

NO_LIMIT = 10**9


def _write(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> Path:
    save_tensors({key: value.contiguous() for key, value in tensors.items()}, folder / name, metadata={"format": "pt"})
    return folder / name


def _round_trip(folder: Path, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> tuple[float, int]:
    """How many values changed and the delta's size; the whole that comes back is the one that went in."""
    anchor, whole = _write(folder, "anchor", old), _write(folder, "whole", new)
    changed = write_delta(whole, anchor, folder / "delta", most_bytes=NO_LIMIT, about={})
    assert changed is not None
    apply_delta(anchor, folder / "delta", folder / "again")
    assert (folder / "again").read_bytes() == whole.read_bytes()
    return changed * sum(tensor.numel() for tensor in new.values()), (folder / "delta").stat().st_size


_DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn]


@st.composite
def _weights(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors of any bits and kinds, and the same with some bytes changed."""
    old, new = {}, {}
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(_DTYPES))
        shape = draw(st.sampled_from([(), (0,), (3, 0), (1,), (7,), (13, 5), (40, 50)]))
        size = int(np.prod(shape)) * dtype.itemsize
        before = random.integers(0, 2 if dtype == torch.bool else 256, size, dtype=np.uint8)
        share = draw(st.sampled_from([0.0, 0.002, 0.1, 1.0]))
        after = np.where(random.random(size) < share, random.permutation(before), before)
        for tensors, data in ((old, before), (new, after)):
            filled = torch.from_numpy(data).view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
            tensors[f"layer.{number}/w"] = filled
    return old, new


@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(weights=_weights(), chunk=st.sampled_from([1, 3, 256, 2**22]))
def test_anchor_and_delta_give_the_whole_bit_for_bit(weights, chunk: int, tmp_path: Path):  # type: ignore[no-untyped-def]
    old, new = weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas, "CHUNK", chunk)
        num_changed, _ = _round_trip(tmp_path, old, new)

    def bits(tensor: torch.Tensor) -> np.ndarray:
        return np.frombuffer(bytes(tensor.untyped_storage()), np.uint8).reshape(-1, tensor.dtype.itemsize)

    expected = sum(int((bits(old[name]) != bits(new[name])).any(axis=1).sum()) for name in old)
    assert num_changed == pytest.approx(expected)


def test_values_are_compared_by_their_bits(tmp_path: Path):
    nan = float("nan")
    old = {"w": torch.tensor([nan, 0.0, 1.0, 2.0], dtype=torch.bfloat16)}
    new = {"w": torch.tensor([nan, -0.0, 1.0, nan], dtype=torch.bfloat16)}
    num_changed, _ = _round_trip(tmp_path, old, new)
    assert num_changed == 2, "NaN equals itself, and −0.0 is not 0.0"
    stored = load_file(tmp_path / "delta")
    assert stored["w/gaps"].tolist() == [1, 1]  # one the same, one changed, one the same, one changed
    assert stored["w/values"].tolist() == [0x8000, 0x7FC0]


def test_long_gaps_take_more_bytes(tmp_path: Path):
    for positions in ([0], [254], [255], [256], [509, 510, 511, 999], [0, 255, 511]):
        old, new = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
        new["w"][positions] = 1.0
        assert _round_trip(tmp_path, old, new)[0] == len(positions)


def test_what_changed_little_is_little_and_nothing_is_an_empty_delta(tmp_path: Path):
    old = {"w": torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)}
    new = {"w": old["w"].clone()}
    new["w"].view(torch.int16).flatten()[::50] += 1  # 2 % of the values, three bytes each, of two million bytes
    num_changed, num_bytes = _round_trip(tmp_path, old, new)
    assert num_changed == 20_000 and 60_000 <= num_bytes < 60_500
    num_changed, num_bytes = _round_trip(tmp_path, new, new)
    assert num_changed == 0 and num_bytes < 100


def test_a_delta_that_grows_too_large_is_given_up(tmp_path: Path):
    anchor = _write(tmp_path, "anchor", {"w": torch.zeros(1000)})
    whole = _write(tmp_path, "whole", {"w": torch.ones(1000)})
    assert write_delta(whole, anchor, tmp_path / "delta", most_bytes=4999, about={}) is None
    assert not (tmp_path / "delta").exists()
    assert write_delta(whole, anchor, tmp_path / "delta", most_bytes=5000, about={}) is not None


def test_other_tensors_make_no_delta(tmp_path: Path):
    four = torch.zeros(4)
    whole = _write(tmp_path, "whole", {"w": four})
    for other in ({"v": four}, {"w": torch.zeros(5)}, {"w": torch.zeros(2, 2)}, {"w": four.half()}, {}):
        anchor = _write(tmp_path, "anchor", other)
        assert write_delta(whole, anchor, tmp_path / "delta", most_bytes=NO_LIMIT, about={}) is None


def test_a_delta_of_other_weights_is_refused(tmp_path: Path):
    anchor = _write(tmp_path, "anchor", {"w": torch.zeros(4)})
    one = np.array([1], np.uint32)
    for name, position, values in (
        ("v", 0, one),
        ("w", 4, one),
        ("w", 0, one.astype(np.uint16)),
        ("w", 0, np.array([1, 2], np.uint32)),
    ):
        save_file({f"{name}/gaps": np.array([position], np.uint8), f"{name}/values": values}, tmp_path / "delta")
        with pytest.raises(DigestMismatch, match="does not have"):
            apply_delta(anchor, tmp_path / "delta", tmp_path / "whole")


def test_a_delta_says_what_it_is(tmp_path: Path):
    anchor = _write(tmp_path, "anchor", {"w": torch.zeros(4)})
    write_delta(anchor, anchor, tmp_path / "delta", most_bytes=NO_LIMIT, about={"anchor_sha256": "a1"})
    assert read_about(tmp_path / "delta")["anchor_sha256"] == "a1"
    (tmp_path / "other").write_bytes(b"{}")
    for file, sentence in ((anchor, "format 'pt'"), (tmp_path / "other", "is no safetensors file")):
        with pytest.raises(DigestMismatch, match=sentence):
            read_about(file)
