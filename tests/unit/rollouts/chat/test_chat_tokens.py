"""What follows a reply is found without rendering the past again, whatever a model family's template does with it.

The templates here are short ones in the style of Qwen2.5, Qwen3, Llama 3 and Mistral; the tokenizers are byte-level.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollouts.chat.chat import Chat
from rollouts.chat.chat_tokens import _KNOWN, ChatTokens
from rollouts.chat.tool_parsing import ToolParser
from rollouts.chat.tools import tool
from rollouts.engines.scripted_engine import ScriptedEngine
from tests.unit.rollouts.scripted_text import a_chat, from_tool, said, user
from trainers.model.warmup import character_tokenizer

QWEN2 = """<|im_start|>system
You are helpful.{% for tool in tools or [] %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QWEN3 = """
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
{%- if message.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == "assistant" %}
{%- set said = message.content.split("</think>")[-1].lstrip("\\n") %}<|im_start|>assistant
{% if loop.index0 > ns.last %}<think>

</think>

{% endif %}{{ said }}<|im_end|>
{% else %}<|im_start|>{{ "user" if message.role == "tool" else message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """
{{- bos_token }}
{%- if tools %}<|start_header_id|>system<|end_header_id|>

{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|eot_id|>{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == "user" %}[INST] {{ message.content }}[/INST]
{%- elif message.role == "tool" %}
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %} {{ message.content }}{{ eos_token }}
{%- endif %}
{%- endfor %}"""

FAMILIES: dict[str, tuple[str, str, str]] = {
    "qwen2": (QWEN2, "<|im_start|> <|im_end|>", "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_start|> <|im_end|>", "<|im_end|>"),
    "llama3": (
        LLAMA3,
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|python_tag|>",
        "<|eot_id|>",
    ),
    "mistral": (MISTRAL, "<s> </s> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]", "</s>"),
}
"""Template, special tokens, end token."""


def family(name: str, *, merges: Sequence[tuple[str, str]] = ()) -> ChatTokens:
    """A byte-level tokenizer with a family's special tokens and template."""
    template, special, end = FAMILIES[name]
    return ChatTokens(byte_tokenizer(template=template, special=special.split(), end=end, merges=merges))


def byte_tokenizer(*, template: str, special: list[str], end: str, merges: Sequence[tuple[str, str]] = ()) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    bpe = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=list(merges)))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    first = {"bos_token": special[0]} if special[0] in ("<|begin_of_text|>", "<s>") else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=end, additional_special_tokens=[s for s in special if s != end], **first
    )
    tokenizer.chat_template = template
    return tokenizer


@tool
def lookup(key: str) -> str:
    """Look something up.

    Args:
        key: what to look for
    """
    return f"value of {key}"


def _chat(
    tokens: ChatTokens, *replies: str | list[int], parser: str = "hermes", asked: list[list[int]] | None = None
) -> Chat:
    """Each reply is one in text, which ends, or ids."""

    def reply(prompt_ids: list[int], request_id: str) -> list[int]:
        if asked is not None:
            asked.append(prompt_ids)
        words = replies[int(request_id.rsplit("/", 1)[1])]
        if isinstance(words, list):
            return words
        return [*tokens.tokenizer.encode(words, add_special_tokens=False), tokens.end_id]

    tool_parser = ToolParser(parser, tokens.tokenizer)
    return a_chat(tokens, ScriptedEngine(reply), max_tokens=200, tool_parser=tool_parser)


def _recorded(chat: Chat) -> list[int]:
    assert {turn.sequence_idx for turn in chat.turns} == {0}
    return [i for turn in chat.turns for i in (*turn.context_ids, *turn.sampled_ids)]


async def _ask_in_turn(chat: Chat, *texts: str) -> list[str]:
    return [await chat.ask(text) for text in texts]


def _decoded(tokens: ChatTokens, ids: list[int]) -> str:
    return tokens.tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["qwen2", "llama3"])
def test_what_follows_a_reply_is_what_the_template_puts_there(name: str):
    tokens = family(name)
    end = tokens.tokenizer.eos_token
    for new in ([user("and?")], [from_tool("42")], [from_tool("42"), from_tool("43")]):
        behind = _decoded(tokens, tokens.prompt([user("hi"), said("hello"), *new])).partition("hello" + end)[2]
        assert _decoded(tokens, tokens.continuation(new, after=tokens.end_id)) == behind
        assert _decoded(tokens, tokens.continuation(new, after=0)) == end + behind


def test_a_template_with_rules_of_its_own_for_history_is_continued_too():
    for name, new, text in [
        # Qwen3's drops what was thought before the last question, and a reply that is the last one looks different.
        ("qwen3", user("and?"), "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", from_tool("42"), "\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n"),
        # Mistral's insists on the ids of calls.
        ("mistral", from_tool("42"), '[TOOL_RESULTS] {"content": 42, "call_id": "000000002"}[/TOOL_RESULTS]'),
    ]:
        tokens = family(name)
        assert _decoded(tokens, tokens.continuation([new], after=tokens.end_id)) == text


def test_a_conversation_that_thinks_keeps_its_thoughts_in_the_tokens():
    tokens = family("qwen3")
    chat = _chat(tokens, "<think>\nhm\n</think>\n\n4", "5")
    asyncio.run(_ask_in_turn(chat, "2+2", "and 1?"))
    assert _decoded(tokens, _recorded(chat)) == (
        "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\n4<|im_end|>\n"
        "<|im_start|>user\nand 1?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>"
    )


@pytest.mark.parametrize(
    ("name", "parser", "call"),
    [
        ("qwen2", "hermes", '<tool_call>\n{"name": "lookup", "arguments": {"key": "k"}}\n</tool_call>'),
        ("llama3", "llama3_json", '<|python_tag|>{"name": "lookup", "parameters": {"key": "k"}}'),
    ],
)
def test_three_turns_with_tools_are_what_the_template_would_render(name: str, parser: str, call: str):
    """With the tools in the first prompt, and special tokens in the call where the family has them."""
    tokens = family(name)
    chat = _chat(tokens, call, call, "done", parser=parser)
    assert asyncio.run(chat.ask("find k", tools=[lookup])) == "done"
    assert [len(turn.tool_calls) for turn in chat.turns] == [1, 1, 0]
    assert [message.content for message in chat.messages] == ["find k", *[call, "value of k"] * 2, "done"]
    recorded = _recorded(chat)
    assert '"name": "lookup"' in _decoded(tokens, chat.turns[0].context_ids)
    rendered = tokens.prompt(chat.messages, tools=[lookup.schema])
    assert recorded == rendered[: len(recorded)] and len(rendered) - len(recorded) < 40  # the next turn's opening


def test_what_the_policy_sampled_is_never_tokenised_again():
    """It may write `ab` as two tokens where the tokenizer would use one; its history keeps the two."""
    tokens = family("qwen2", merges=[("a", "b")])
    vocab = tokens.tokenizer.get_vocab()
    unusual = [vocab["a"], vocab["b"], tokens.end_id]
    assert tokens.tokenizer.encode("ab") == [vocab["ab"]]

    asked: list[list[int]] = []
    chat = _chat(tokens, unusual, unusual, asked=asked)
    assert asyncio.run(_ask_in_turn(chat, "ab", "go on"))[0] == "ab"
    first = tokens.prompt([user("ab")])
    assert vocab["ab"] in first  # what was not sampled is tokenised as always
    assert asked[1][: len(first) + 3] == [*first, *unusual]
    assert vocab["ab"] not in asked[1][len(first) :]


def test_special_tokens_are_text_only_where_calls_may_consist_of_them():
    tokens = family("llama3")
    ids = tokens.tokenizer.encode("<|python_tag|>{}<|eot_id|>", add_special_tokens=False)
    assert tokens.text(ids) == "{}"
    assert tokens.text(ids, keep_special=True) == tokens.text(ids[:-1], keep_special=True) == "<|python_tag|>{}"


def test_the_tokenizer_is_known_by_its_digests(tokens: ChatTokens, tokenizer_folder: Path):
    again = ChatTokens.load(tokenizer_folder)
    digests = (again.tokenizer_sha256, again.chat_template_sha256)
    assert digests == (tokens.tokenizer_sha256, tokens.chat_template_sha256) and set(map(len, digests)) == {64}
    assert tokens.alphabet() == list(range(4, 16)) and tokens.end_id == 1
    assert tokens.text([5, 6, 1]) == "01"


def test_a_tokenizer_without_a_template_or_one_that_does_not_close_replies_is_refused_with_the_fix():
    with pytest.raises(ValueError, match="no chat template; use an instruction-tuned model"):
        ChatTokens(byte_tokenizer(template="", special=["<end>"], end="<end>"))
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokens = ChatTokens(byte_tokenizer(template=template, special=["<end>"], end="<end>"))
    assert tokens.prompt([user("hi")])
    with pytest.raises(ValueError, match=r"does not end an assistant's reply with a special token"):
        tokens.continuation([user("and?")], after=0)


@pytest.mark.server
def test_the_tokenizer_is_autotokenizers_choice_and_its_import_is_spared_if_that_is_clear(tmp_path: Path):
    from transformers import AutoTokenizer

    kinds = [(kind, name) for kind, names in _KNOWN.items() for name in names]
    for kind, name in [*kinds, ("mistral", "LlamaTokenizerFast"), ("llama", "no such")]:
        folder = tmp_path / f"{kind}-{name}"
        character_tokenizer(set("0123456789+=")).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        about = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps({**about, "tokenizer_class": name, "add_prefix_space": False})
        )
        chosen = AutoTokenizer.from_pretrained(str(folder))
        loaded = ChatTokens.load(folder).tokenizer
        assert type(loaded) is type(chosen) and loaded.encode("12+7=") == chosen.encode("12+7="), (kind, name)
    code = (
        "import sys; from pathlib import Path; from rollouts.chat.chat_tokens import ChatTokens\n"
        f"[ChatTokens.load(Path({str(tmp_path)!r}, '-'.join(kind))) for kind in {kinds}]\n"
        "sys.exit('transformers.generation.utils' in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
