"""Model families by their chat templates, with small byte-level tokenizers that have their control tokens.

In: a name. Out: the tokenizer, what the policy writes to call `lookup(key="k")`, and the token that ends it. TRL
carries the templates as the models ship them; the others are written here as far as conversations need them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MISTRAL = """
{%- if messages[0].role == "system" %}
    {%- set system_message = messages[0].content %}{%- set messages = messages[1:] %}
{%- endif %}
{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in messages if not (message.role == "tool" or message.tool_calls) %}
    {%- if (message.role == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- if tools and message == user_messages[-1] %}
            {{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message.content + "[/INST]" }}
    {%- elif message.tool_calls %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception("Tool call IDs have length 9!") }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (", " if not loop.last else "]") }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == "assistant" %}{{- " " + message.content | trim + eos_token }}
    {%- elif message.role == "tool" %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception("Tool call IDs have length 9!") }}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
_PHI4_MINI = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
_SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_GLM4 = """[gMASK]<sop>
{%- if tools %}<|system|>
# Tools
{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.role == "assistant" and message.tool_calls %}
{%- for call in message.tool_calls %}<|assistant|>{{ call.function.name }}
{{ call.function.arguments | tojson }}{% endfor %}
{%- elif message.role == "tool" %}<|observation|>
{{ message.content }}
{%- else %}<|{{ message.role }}|>
{{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A chat template, and how the model behind it writes."""

    template: str
    """Its text, or the name of TRL's file."""
    special: str
    """Its special tokens."""
    end: str
    """What ends a reply."""
    plain: str = ""
    """Its other added tokens."""
    eos: str = ""
    """The tokenizer's own end token, if that is another."""
    bos: str = ""
    call: str = ""
    """How the policy writes a call; empty if the template knows no tools."""
    call_end: str = ""
    """What ends a call, if that is another."""
    before: str = ""
    """What the policy writes before an answer: thoughts, or what its template opens an answer with."""
    behind: str = ""
    """What the policy writes between an answer and its end."""
    rewritten_from: int = 3
    """The first prompt in which the template shows earlier replies, or the place of the tools, in another way than it
    did: what an attempt records stays as it was. 3 if none of the three does."""


_CHATML = {"special": "<|im_start|> <|im_end|> <|endoftext|>", "end": "<|im_end|>"}
_THINKS = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
_THINKING = {"plain": _THINKS, "before": "\n</think>\n\n", **_CHATML}
_JSON_CALL = '{"name": "lookup", "arguments": {"key": "k"}}'
_HERMES = f"<tool_call>\n{_JSON_CALL}\n</tool_call>"
_XML = "<tool_call>\n<function=lookup>\n<parameter=key>\nk\n</parameter>\n</function>\n</tool_call>"
_LLAMA = {
    "special": "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|python_tag|>",
    "end": "<|eot_id|>",
    "bos": "<|begin_of_text|>",
}
_PHI = {"special": "<|system|> <|user|> <|assistant|> <|end|> <|endoftext|>", "end": "<|end|>", "eos": "<|endoftext|>"}
_GEMMA = {
    "special": "<bos> <eos> <start_of_turn> <end_of_turn>",
    "end": "<end_of_turn>",
    "eos": "<eos>",
    "bos": "<bos>",
}
_TOOL_MARKS = (
    "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> "
    "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
)
_DEEPSEEK = {
    "special": f"<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> {_TOOL_MARKS}",
    "end": "<｜end▁of▁sentence｜>",
    "bos": "<｜begin▁of▁sentence｜>",
    "plain": "<think> </think>",
}
_GLM_SPECIAL = "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>"
_GLM: dict[str, Any] = {
    "special": _GLM_SPECIAL,
    "end": "<|user|>",
    "eos": "<|endoftext|>",
    "call_end": "<|observation|>",
}
FAMILIES: dict[str, Family] = {
    "qwen2.5": Family(template="qwen2_5", call=_HERMES, plain="<tool_call> </tool_call>", **_CHATML),
    "qwen2.5 base": Family(
        template="qwen2_5", call=_HERMES, plain="<tool_call> </tool_call>", eos="<|endoftext|>", **_CHATML
    ),
    "qwen3": Family(template="qwen3", plain=_THINKS, call=_HERMES, **_CHATML),
    "qwen3.5": Family(template="qwen3_5_think", call=_XML, rewritten_from=2, **_THINKING),
    "qwen3.6": Family(template="qwen3_6", call=_XML, rewritten_from=2, **_THINKING),
    "qwen3.8": Family(template="qwen3_8", call=_XML, **_THINKING),
    "qwen3 2507": Family(template="qwen3_instruct_2507", plain=_THINKS, call=_HERMES, **_CHATML),
    "nemotron 3": Family(
        template="nemotron_3_nano", call=_XML + "\n", rewritten_from=1, **_THINKING | {"before": "</think>"}
    ),
    "lfm2.5": Family(
        template="lfm2_2_5_v2",
        special="<|startoftext|> <|im_start|> <|im_end|> <|tool_call_start|> <|tool_call_end|>",
        end="<|im_end|>",
        bos="<|startoftext|>",
        call="<|tool_call_start|>[lookup(key='k')]<|tool_call_end|>",
    ),
    "smolvlm": Family(
        template="smolvlm", special="<|im_start|> <end_of_utterance>", end="<end_of_utterance>", before=" "
    ),
    "smollm2": Family(template=_SMOLLM2, **_CHATML),
    "llama3": Family(template="llama3", eos="<|end_of_text|>", **_LLAMA),
    "llama3.1": Family(template="llama3_1", call=_JSON_CALL.replace("arguments", "parameters"), **_LLAMA),
    "llama3.2": Family(template="llama3_2", call=_JSON_CALL.replace("arguments", "parameters"), **_LLAMA),
    "mistral": Family(
        template=_MISTRAL,
        special="<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] "
        "[TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        end="</s>",
        bos="<s>",
        call='[TOOL_CALLS] [{"arguments": {"key": "k"}, "name": "lookup", "id": "000000002"}]',
        before=" ",
        rewritten_from=2,
    ),
    "gemma": Family(template="gemma", **_GEMMA),
    "gemma3": Family(template="gemma3", **_GEMMA),
    "gemma4": Family(
        template="gemma4_v5",
        special="<bos> <eos> <|turn> <turn|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> "
        '<tool_response|> <|"|> <|channel> <channel|> <|think|>',
        end="<turn|>",
        eos="<eos>",
        bos="<bos>",
        call='<|tool_call>call:lookup{key:<|"|>k<|"|>}<tool_call|>',
        call_end="<|tool_response>",
    ),
    "command a": Family(
        template="cohere2",
        special="<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> "
        "<|SYSTEM_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|>",
        bos="<BOS_TOKEN>",
        end="<|END_OF_TURN_TOKEN|>",
        behind="<|END_RESPONSE|>",
    ),
    "phi3": Family(template="phi3", **_PHI),
    "phi3.5": Family(template="phi3_5", **_PHI),
    "phi4-mini": Family(template=_PHI4_MINI, **_PHI),
    "glm4": Family(template=_GLM4, call='lookup\n{"key": "k"}', before="\n", **_GLM),
    "glm4.5": Family(
        template="glm4moe",
        plain=f"{_THINKS} <arg_key> </arg_key> <arg_value> </arg_value>",
        call="<tool_call>lookup\n<arg_key>key</arg_key>\n<arg_value>k</arg_value>\n</tool_call>",
        before="\n<think></think>\n",
        **_GLM,
    ),
    "deepseek v3": Family(
        template="deepseekv3",
        call="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>lookup\n```json\n"
        '{"key": "k"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        rewritten_from=1,
        **_DEEPSEEK,
    ),
    "deepseek r1": Family(template="deepseek_r1_distill", before="hm\n</think>", rewritten_from=1, **_DEEPSEEK),
    "gpt-oss": Family(
        template="gptoss",
        special="<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|return|> <|call|> <|endoftext|>",
        end="<|return|>",
        call=' to=functions.lookup<|channel|>commentary json<|message|>{"key": "k"}',
        call_end="<|call|>",
        before="<|channel|>final<|message|>",
        rewritten_from=2,
    ),
}


def tokenizer_of(name: str, *, fixed_day: bool = True) -> Any:
    """The family's tokenizer, whose template names another day only if `fixed_day` is false."""
    family = FAMILIES[name]
    text = family.template
    if "{" not in text:
        trl = importlib.util.find_spec("trl")
        assert trl is not None and trl.origin is not None
        text = (Path(trl.origin).parent / "chat_templates" / f"{text}.jinja").read_text()
        if fixed_day:
            text = re.sub(r"strftime_now\(.*?\)", '"2026-01-01"', text)  # the day of the test
    return byte_tokenizer(
        template=text,
        special=family.special.split(),
        end=family.eos or family.end,
        bos=family.bos,
        plain=family.plain.split(),
    )


def byte_tokenizer(
    *,
    template: str,
    special: Sequence[str],
    end: str,
    bos: str = "",
    plain: Sequence[str] = (),
    merges: Sequence[tuple[str, str]] = (),
) -> Any:
    """A token per byte, one per merge, and added tokens: `special` ones and `plain` ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    bpe = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=list(merges)))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    bpe.add_tokens([AddedToken(token, normalized=False) for token in plain])
    names = {"bos_token": bos} if bos else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end, **names)
    tokenizer.chat_template = template
    return tokenizer
