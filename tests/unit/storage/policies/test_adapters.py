"""The digest of the adapter stands beside each row, and a row sampled by other weights is named."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file

from settings.errors import InvalidInput
from storage.log.entries import Policy
from storage.policies.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_adapters, merged_weights
from storage.records import Turn
from storage.shards.codec import shard_table
from storage.shards.schema import SCHEMA, BadShard
from storage.shards.shards import DamagedShard
from tests.builders import SAMPLING, a_group, a_trajectory, a_turn, provenance
from tests.shard_files import decode_shard, file_with

_POLICIES = {
    0: Policy(version=0, path="models/base", weights_sha256="b" * 64, parent=None),
    1: Policy(version=1, path="models/base", weights_sha256="b" * 64, parent=0),  # its step was skipped
    2: Policy(version=2, path="runs/run/policies/2-a", weights_sha256="2" * 64, parent=1),
    3: Policy(version=3, path="runs/run/policies/3-a", weights_sha256="3" * 64, parent=2),
}
_DIGESTS = {2: "2" * 64, 3: "3" * 64}


def _turn(*versions: int, adapters: dict[int, str] | None = None) -> Turn:
    """One sampled token for each version, and what an honest engine says of them."""
    honest = {version: _DIGESTS[version] for version in set(versions) & _DIGESTS.keys()}
    return a_turn([5] * len(versions), versions=versions, adapters=honest if adapters is None else adapters)


def _table(*attempts: list[Turn]) -> pa.Table:
    trajectories = [a_trajectory(1.0, attempt=number, turns=turns) for number, turns in enumerate(attempts)]
    group = a_group(0, trajectories=trajectories)
    return shard_table([group], provenance=provenance("s"), sampling=SAMPLING)


def test_each_row_holds_the_digests_of_the_adapters_that_sampled_it():
    table = _table([_turn(0, 0)], [_turn(1, 2), _turn(2, 3)], [_turn(3)])
    assert [dict(row) for row in table["adapters"].to_pylist()] == [{}, _DIGESTS, {3: "3" * 64}]
    check_adapters(table, shard_id="s", policies=_POLICIES)
    without = _table([_turn(0)], [_turn(0, 1)])
    assert without.schema.names == SCHEMA.names
    check_adapters(without, shard_id="s", policies=_POLICIES)
    with pytest.raises(DamagedShard, match="row 1 .*sampled with no adapter"):
        check_adapters(table.drop_columns(["adapters"]), shard_id="s", policies=_POLICIES)


def test_a_row_sampled_by_other_weights_is_refused_by_name():
    other = "9" * 64
    for turn, sentence in (
        (_turn(2, adapters={}), "version 2 that the engine sampled with no adapter; that policy has adapter 2222"),
        (_turn(2, adapters={2: other}), "version 2 that the engine sampled with adapter 9999.*has adapter 2222"),
        (_turn(1, adapters={1: other}), "version 1 that the engine sampled with adapter 9999.*has no adapter"),
        (_turn(2, 2, 0, 3, adapters={2: "2" * 64}), "version 3 that the engine sampled with no adapter"),
        (_turn(2, 1, 3, adapters={**_DIGESTS, 1: other}), "version 1 that the engine sampled with adapter 9999"),
        (_turn(4, adapters={4: "4" * 64}), "version 4 .*that policy is not in the log"),
    ):
        where = r"shard s: row 1 \(group 0\.task0, attempt 1\) has tokens of policy"
        with pytest.raises(DamagedShard, match=f"{where} .*{sentence}"):
            check_adapters(_table([_turn(2)], [turn]), shard_id="s", policies=_POLICIES)


def test_a_version_with_two_adapters_and_a_column_of_another_type_are_refused():
    with pytest.raises(BadShard, match="shard s: group 0.task0 was sampled by two adapters, both of policy version 2"):
        _table([_turn(2), _turn(2, adapters={2: "9" * 64})])
    table = _table([_turn(2)])
    renamed = table.set_column(table.schema.get_field_index("adapters"), "adapters", pa.array(["2"]))
    with pytest.raises(BadShard, match="column adapters has type string"):
        decode_shard(file_with(renamed), name="s")


def test_an_adapter_is_merged_by_the_names_of_layers_and_one_without_a_weight_is_named(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
    layer = "layers.0.mlp.up_proj"
    weights = {f"language_model.model.{layer}.weight": torch.zeros(2, 3).bfloat16(), "norm.weight": torch.ones(2)}
    save_file(weights, base / "model.safetensors")
    a, b = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0], [-1.0]])
    named = f"base_model.model.model.{layer}"
    save_file({f"{named}.lora_A.weight": a, f"{named}.lora_B.weight": b}, adapter / ADAPTER_WEIGHTS)
    (adapter / ADAPTER_CONFIG).write_text('{"lora_alpha": 4.0, "r": 2}')
    merged = dict(merged_weights(base, adapter))
    assert merged.keys() == weights.keys() and torch.equal(merged["norm.weight"], weights["norm.weight"])
    assert merged[f"language_model.model.{layer}.weight"].tolist() == [[2.0, 4.0, 6.0], [-2.0, -4.0, -6.0]]
    save_file({"norm.weight": torch.ones(2)}, base / "model.safetensors")
    with pytest.raises(InvalidInput, match=f"no weight of model.{layer} to merge .*enable_lora = true"):
        list(merged_weights(base, adapter))
