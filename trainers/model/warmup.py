"""A base model made on the spot: the stand-in for a download if no model hub is reachable.

In: demonstrations (chat conversations). Out: a folder in HF layout with a tiny Qwen2-architecture model and a
character tokenizer, taught by supervised training to a middling level that reinforcement learning then lifts.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from settings.warmup import TINY_POSITIONS, WarmupSettings
from storage.objects.digests import seal_folder
from storage.records import Message

logger = logging.getLogger("millrace.warmup")

SECONDS_BETWEEN_LINES = 5.0
PATIENCE = 500
"""Updates without a fall of 1 % after which a target is out of reach: the noise of careless demonstrations stays."""

_SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{{ message['content'] }}<end>"
    "{% else %}<user>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_IGNORED = -100  # torch's label for positions without a loss


def make_base_model(
    folder: Path,
    demonstrations: Sequence[Sequence[Message]],
    settings: WarmupSettings,
    *,
    seed: int,
) -> float:
    """Train a model from scratch on the replies in each demonstration; returns the final loss (nats per token).

    Training ends at `target_loss`, a mean over the last 20 updates, or when the loss no longer falls, or after
    `num_steps`. The folder holds config, weights (float32), tokenizer and `digest.json`.
    """
    torch.manual_seed(seed)
    tokenizer = character_tokenizer({character for chat in demonstrations for m in chat for character in m.content})
    input_ids, labels = _tensors(tokenizer, demonstrations)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=4 * settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=max(1, settings.hidden_size // 32),
        num_key_value_heads=max(1, settings.hidden_size // 32),
        max_position_embeddings=TINY_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    started = logged_at = time.perf_counter()
    losses: list[float] = []
    lowest, lowest_step = math.inf, 0
    for step in range(1, settings.num_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, step / 50)
        rows = torch.randint(len(input_ids), (settings.batch_size,))
        logits = model(input_ids=input_ids[rows]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[rows][:, 1:].flatten(), ignore_index=_IGNORED
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        mean_loss, level = statistics.fmean(losses[-20:]), statistics.fmean(losses[-100:])
        if level < 0.99 * lowest:
            lowest, lowest_step = level, step
        ends = ""
        if step >= 20 and mean_loss <= settings.target_loss:
            ends = "reached"
        elif step - lowest_step >= PATIENCE:
            ends = f"ends here: it has not fallen for {PATIENCE} updates, so warmup.target_loss is out of reach"
        elif step == settings.num_steps:
            ends = "ends here, after warmup.num_steps"
        now = time.perf_counter()
        if ends or now - logged_at >= SECONDS_BETWEEN_LINES:
            facts = (step, settings.num_steps, mean_loss, settings.target_loss, now - started)
            logged_at, why = now, f"; {ends}" if ends else ""
            logger.info("base model: step %d of at most %d, loss %.3f, wanted %g, %.0f s%s", *facts, why)
        if ends:
            break
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    seal_folder(folder)
    return mean_loss


def character_tokenizer(characters: set[str]) -> Qwen2Tokenizer:
    """One token per character (outside ASCII per byte), and special tokens for the two speakers and a reply's end.

    A `Qwen2Tokenizer` without merges, because AutoTokenizer makes one beside any Qwen2 model. Other characters are
    dropped.
    """
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = {symbol for character in characters for symbol in to_bytes.pre_tokenize_str(character)[0][0]}
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate([*_SPECIAL, *sorted(symbols)])},
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _tensors(
    tokenizer: Qwen2Tokenizer, demonstrations: Sequence[Sequence[Message]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded input ids and labels, each of shape [demonstrations, longest]; only replies have labels."""
    chats = [[{"role": m.role, "content": m.content} for m in chat] for chat in demonstrations]
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    rows = [torch.tensor(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    opened = (input_ids == tokenizer.convert_tokens_to_ids("<assistant>")).cumsum(1)
    closed = (input_ids == tokenizer.eos_token_id).cumsum(1)
    labels = torch.full_like(input_ids, _IGNORED)
    in_reply = opened[:, :-1] > closed[:, :-1]  # one is open before this token: its end is learnt, its start is not
    labels[:, 1:][in_reply] = input_ids[:, 1:][in_reply]
    return input_ids, labels
