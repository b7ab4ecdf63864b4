"""What a `config.json` says of positions."""

from typing import Any

import pytest

from storage.policies.model_config import num_positions

_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
_FIRST = {"original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("about", "longest"),
    [
        ({}, None),
        ({"n_positions": 64}, 64),
        ({"max_position_embeddings": 128, "rope_parameters": {"rope_type": "yarn"}}, 128),
        ({"max_position_embeddings": 128, "rope_parameters": _LONGROPE}, 128),
        (
            {"max_position_embeddings": 128, "rope_parameters": {**_LONGROPE, "original_max_position_embeddings": 16}},
            16,
        ),
        ({"original_max_position_embeddings": 32, "n_positions": 128, "rope_scaling": {"type": "longrope"}}, 32),
        ({"max_position_embeddings": 128, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, 128),
    ],
)
def test_rows_are_as_long_as_transformers_and_vllm_rotate_alike(about: dict[str, Any], longest: int | None) -> None:
    assert num_positions(about) == longest
