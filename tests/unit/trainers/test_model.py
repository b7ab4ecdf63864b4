"""A packed forward pass gives every sequence the log-probabilities it has alone."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.unit.trainers.builders import load_causal_lm, logprobs_alone, tiny_model
from trainers.model import PolicyModel, load_model
from trainers.packing import block_causal_mask, position_ids

_SEQUENCES = [[4, 5, 6, 7, 8], [9], [10, 4], [11, 12, 13, 14, 15, 4, 5]]


def _packed(model: PolicyModel, temperature: float) -> list[torch.Tensor]:
    """Log-probabilities of each sequence's tokens after the first, from one pass over all of them."""
    lengths = [len(sequence) for sequence in _SEQUENCES]
    ids = torch.tensor([token for sequence in _SEQUENCES for token in sequence])
    targets = torch.cat([torch.tensor([*sequence[1:], 0]) for sequence in _SEQUENCES])
    logprobs, entropy = model(ids, targets, position_ids(lengths), block_causal_mask(lengths), temperature)
    assert logprobs.shape == entropy.shape == ids.shape
    return [part[:-1] for part in logprobs.split(lengths)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_equals_alone(tmp_path: Path, temperature: float, tied: bool) -> None:
    folder = tiny_model(tmp_path / "model", tied=tied)
    reference = load_causal_lm(folder)
    with torch.no_grad():
        for sequence, logprobs in zip(_SEQUENCES, _packed(load_model(folder), temperature), strict=True):
            alone = logprobs_alone(reference, sequence, temperature=temperature)
            torch.testing.assert_close(logprobs, alone, atol=1e-5, rtol=0)


def test_without_the_block_mask_the_first_test_would_fail(tiny_folder: Path) -> None:
    a, b = _SEQUENCES[0], _SEQUENCES[3]
    reference = load_causal_lm(tiny_folder)
    with torch.no_grad():
        seen_together = logprobs_alone(reference, a + b)[len(a) :]
        assert (seen_together - logprobs_alone(reference, b)).abs().max() > 1e-2


def test_bfloat16_weights_are_trained_in_float32(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    load_causal_lm(folder).to(torch.bfloat16).save_pretrained(folder)
    assert {parameter.dtype for parameter in load_model(folder).parameters()} == {torch.float32}


def test_a_model_without_decoder_layers_is_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no decoder layers"):
        load_model(tmp_path / "gpt2")


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError), match=tmp_path.name):
        load_model(tmp_path)
