"""The base model made on the spot is an ordinary HF folder that starts to learn its demonstrations."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from settings.train import WarmupSettings
from storage.objects.digests import verify_folder
from storage.records import Message
from trainers.model.model import load_model
from trainers.model.warmup import _tensors, character_tokenizer, make_base_model


def _chat(prompt: str, reply: str) -> list[Message]:
    return [Message(role="user", content=prompt), Message(role="assistant", content=reply)]


_SUMS = [_chat(f"{a}+{b}=", str(a + b)) for a in range(5) for b in range(5)]


def _make(
    folder: Path,
    *,
    demonstrations: list[list[Message]] = _SUMS,
    num_steps: int = 3,
    target_loss: float = 0.01,
    seed: int = 0,
    num_layers: int = 2,
) -> float:
    return make_base_model(
        folder,
        demonstrations,
        hidden_size=32,
        num_layers=num_layers,
        target_loss=target_loss,
        num_steps=num_steps,
        batch_size=8,
        learning_rate=1e-2,
        seed=seed,
    )


def test_a_few_steps_make_a_sealed_folder_that_transformers_and_the_trainer_load(tmp_path: Path) -> None:
    _make(tmp_path / "model", num_layers=1)
    verify_folder(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert len(load_model(tmp_path / "model").layers) == 1
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+2="}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<user>1+2=<assistant>"


def test_the_loss_falls_and_training_ends_at_the_target(tmp_path: Path) -> None:
    assert _make(tmp_path / "short", num_steps=1) > 2.0  # ln 14 = 2.6 where every token is as likely
    reached = _make(tmp_path / "long", num_steps=200, target_loss=1.5)
    assert reached <= 1.5


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        _make(tmp_path / name, seed=seed)
    digests = [verify_folder(tmp_path / name) for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


def test_a_conversation_goes_through_the_chat_template_and_back() -> None:
    tokenizer = character_tokenizer(set("0123456789+="))
    chat = [{"role": "user", "content": "12+3="}, {"role": "assistant", "content": "15"}]
    ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert tokenizer.decode(ids) == "<user>12+3=<assistant>15<end>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12+3=15"
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids[: len(prompt)] == prompt and ids[-1] == tokenizer.eos_token_id


_ALPHABET = " \n\t.,'!?0123abcé½漢🙂"
_LETTERS = character_tokenizer(set(_ALPHABET))


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """A base model's tokenizer as everybody else gets it: AutoTokenizer looks at the model beside it."""
    folder = tmp_path_factory.mktemp("letters") / "model"
    _make(folder, num_steps=1, demonstrations=[_chat(_ALPHABET, "a")])
    return AutoTokenizer.from_pretrained(folder)


@given(text=st.text(alphabet=_ALPHABET, max_size=20))
def test_any_text_of_known_characters_comes_back_from_the_saved_tokenizer_too(
    reloaded: PreTrainedTokenizerFast, text: str
) -> None:
    ids = _LETTERS(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert _LETTERS.decode(ids) == text
    assert reloaded(text, add_special_tokens=False)["input_ids"] == ids
    assert reloaded.decode(ids) == text


def test_the_saved_tokenizer_has_the_same_vocabulary_and_no_id_beyond_the_embeddings(
    reloaded: PreTrainedTokenizerFast,
) -> None:
    assert reloaded.get_vocab() == _LETTERS.get_vocab()
    assert sorted(reloaded.get_vocab().values()) == list(range(4 + len(set(_ALPHABET.encode()))))


def test_every_reply_is_learnt_and_nothing_else() -> None:
    tokenizer = character_tokenizer(set("0123456789+="))
    input_ids, labels = _tensors(tokenizer, [_chat("1+2=", "3"), [*_chat("1", "2"), *_chat("4+5=", "09")]])
    learnt = [tokenizer.decode(row[row >= 0]) for row in labels]
    assert learnt == ["3<end>", "2<end>09<end>"]
    assert (labels[labels >= 0] == input_ids[labels >= 0]).all()
    assert tokenizer.decode(input_ids[1]) == "<user>1<assistant>2<end><user>4+5=<assistant>09<end>"


@pytest.mark.parametrize("hidden_size", [33, 48, 100])
def test_a_width_the_heads_cannot_share_is_refused_at_once(hidden_size: int) -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        WarmupSettings(hidden_size=hidden_size)
