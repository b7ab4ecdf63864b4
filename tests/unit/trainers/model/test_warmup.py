"""The base model made on the spot is an ordinary HF folder that starts to learn its demonstrations."""

import logging
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from settings.warmup import WarmupSettings
from storage.objects.digests import verify_folder
from storage.records import Message
from trainers.model import warmup
from trainers.model.model import load_model
from trainers.model.warmup import _tensors, character_tokenizer, make_base_model


def _chat(prompt: str, reply: str) -> list[Message]:
    return [Message(role="user", content=prompt), Message(role="assistant", content=reply)]


_SUMS = [_chat(f"{a}+{b}=", str(a + b)) for a in range(5) for b in range(5)]


def _make(folder: Path, *, demonstrations: list[list[Message]] = _SUMS, seed: int = 0, **changes: Any) -> float:
    small: dict[str, Any] = {
        "hidden_size": 32,
        "target_loss": 0.01,
        "num_steps": 3,
        "batch_size": 8,
        "learning_rate": 1e-2,
    }
    return make_base_model(folder, demonstrations, WarmupSettings(**(small | changes)), seed=seed)


def test_a_few_steps_make_a_sealed_folder_that_transformers_and_the_trainer_load(tmp_path: Path) -> None:
    _make(tmp_path / "model", num_layers=1)
    verify_folder(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert len(load_model(tmp_path / "model").layers) == 1
    chat = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert tokenizer.decode(ids) == "<user>1+2=<assistant>3<end>" and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1+2=3"
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids[: len(prompt)] == prompt and tokenizer.decode(prompt) == "<user>1+2=<assistant>"


def test_the_loss_falls_and_training_ends_at_the_target(tmp_path: Path) -> None:
    assert _make(tmp_path / "short", num_steps=1) > 2.0  # ln 14 = 2.6 where every token is as likely
    reached = _make(tmp_path / "long", num_steps=200, target_loss=1.5)
    assert reached <= 1.5


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        _make(tmp_path / name, seed=seed)
    digests = [verify_folder(tmp_path / name) for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


def test_any_text_of_known_characters_comes_back_from_the_saved_tokenizer_too(tmp_path: Path) -> None:
    alphabet = " \n\t.,'!?0123abcé½漢🙂"
    letters = character_tokenizer(set(alphabet))
    _make(tmp_path / "model", num_steps=1, demonstrations=[_chat(alphabet, "a")])
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "model")  # which looks at the model beside it
    assert sorted(reloaded.get_vocab().values()) == list(range(4 + len(set(alphabet.encode()))))
    draw = random.Random(0)
    for length in range(100):
        text = "".join(draw.choices(alphabet, k=length))
        ids = letters(text, add_special_tokens=False)["input_ids"]
        assert reloaded(text, add_special_tokens=False)["input_ids"] == ids and len(ids) == len(text.encode())
        assert letters.decode(ids) == reloaded.decode(ids) == text


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


def test_it_says_how_far_it_is_by_the_clock_and_where_it_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every so many updates, which take minutes if replies are long."""
    monkeypatch.setattr(warmup, "SECONDS_BETWEEN_LINES", 0.0)
    with caplog.at_level(logging.INFO, logger="millrace.warmup"):
        _make(tmp_path / "model", num_layers=1)
    steps = [message.partition(", loss")[0] for message in caplog.messages]
    assert steps == [f"base model: step {step} of at most 3" for step in (1, 2, 3)]
    assert all(", wanted 0.01, " in message for message in caplog.messages)


def test_a_target_out_of_reach_ends_when_the_loss_no_longer_falls_and_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "PATIENCE", 40)
    coin = [_chat("x", reply) for reply in "01"]  # 0.69 nats for the digit, none for the end
    with caplog.at_level(logging.INFO, logger="millrace.warmup"):
        loss = _make(tmp_path / "model", demonstrations=coin, num_steps=2000, num_layers=1)
        _make(tmp_path / "short", num_steps=2, num_layers=1)
    assert loss == pytest.approx(0.69 / 2, abs=0.05)
    assert "; ends here: it has not fallen for 40 updates, so warmup.target_loss is out of" in caplog.messages[-2]
    assert caplog.messages[-1].endswith("; ends here, after warmup.num_steps")
