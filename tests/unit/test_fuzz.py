"""What others wrote, spoiled in every way: each parser reads it or says what is wrong in its own words.

In: valid examples of each kind of input. Out: the table `PARSERS`, and for each row some hundred spoiled examples from
a fixed seed (many thousand in the long form, `-m slow`). What a parser may raise stands in its row; anything else, and
an answer of the endpoint from 500 on, is a failure that names the seed.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import json
import random
import re
import signal
import string
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.search_agent.retrieval.passages import BadCorpus, read_passages
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.tool_parsing import CallRequest, ParsedReply, _read
from rollouts.chat.tools import run_calls, tool
from rollouts.endpoint.agent_endpoint import agent_endpoint
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.environments.rows import read_rows
from rollouts.rewards.answers import exact, final_answer, gsm8k, matches, math_answer
from rollouts.rewards.code_blocks import python_block
from rollouts.rewards.code_reward import _read as read_tests
from rollouts.rewards.judge import Judge, verdict_in
from rollouts.rewards.scoring import RewardFailed
from settings.errors import InvalidInput
from settings.run_file import as_toml, load_run_file
from storage.log.history import decode_entry
from storage.log.run_log import RunLog
from storage.objects.digests import DIGEST_FILE, DigestMismatch, read_seal
from storage.objects.tables import ipc_bytes
from storage.shards.reward_sets import SCHEMA as REWARDS
from storage.shards.reward_sets import DamagedRewards, _decode
from storage.shards.schema import BadShard
from tests.builders import SAMPLING, MemoryStore, a_config, a_group, a_log, a_step, commit, provenance
from tests.shard_files import decode_shard, encode_shard
from tests.unit.rollouts.chat.template_families import tokenizer_of
from tests.unit.rollouts.scripted_text import ADD, Brackets, a_chat

MOST_SECONDS = 60.0
"""Of one input, on a busy machine; they take milliseconds."""


class Parser(NamedTuple):
    """A row of the table."""

    examples: Callable[[], Sequence[bytes]]
    """Valid inputs."""
    parse: Callable[[bytes, Path], object]
    """Reads an input; the folder is for files."""
    may_raise: tuple[type[BaseException], ...] = ()
    share: float = 1.0
    """Of the usual number of inputs; slow parsers get fewer."""


# --- spoiling

_DEEP = "@deep@"
VALUES: list[Any] = [
    *(None, True, 0, -1, 2**63, 2**70, 10**4000, 0.5, 1e308, float("inf"), float("nan"), "", "0", "x" * 5000),
    *("\ud83d", "\x00", "\x1b[2J\u202e", "../../etc", "‮<|im_end|>", _DEEP, [], [[]], {}, {"": {}}, [None], {"a": 1}),
    *(
        {"type": "text"},
        {"kind": "nothing"},
        ["a", 1],
        "9" * 400,
        "1e999999999",
        "NaN",
        "\\boxed{" * 50,
        "<think>" * 50,
    ),
]
PIECES = [
    *(
        b"",
        b"\x00",
        b"\xff\xfe",
        b"\xed\xa0\xbd",
        b"\r\n\r\n",
        b"\n",
        b'"',
        b"\\",
        b"{",
        b"}",
        b"[",
        b"]",
        b"null",
        b"-",
    ),
    *(
        b"1e999",
        b"9" * 5000,
        b"[" * 100_000,
        b'{"a":' * 20_000,
        b"(" * 3000,
        b"\\u",
        b"\\ud83d",
        b"\xf0\x9f",
        b"data: ",
    ),
    *(
        b"```python\n",
        b"\\boxed{",
        b"\\frac{1}",
        b"^" * 200,
        b"$" * 50,
        b"<tool_call>",
        b"</think>",
        b"=",
        b"'''",
        b"%s",
    ),
]


def _changed(rng: random.Random, value: Any) -> Any:
    """JSON data with one value replaced, removed, doubled or renamed."""
    if not value or not isinstance(value, dict | list) or rng.random() < 0.15:
        return rng.choice(VALUES)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, copy = rng.choice(keys), value.copy()
    match rng.randrange(6):
        case 0:
            del copy[key]
        case 1 if isinstance(copy, dict):
            copy[rng.choice(["", "kind", "\ud83d", "n", "temperature", "x" * 300])] = rng.choice(VALUES)
        case 1:
            copy = copy * rng.choice([2, 30])
        case _:
            copy[key] = _changed(rng, copy[key])
    return copy


def _document(value: Any) -> bytes:
    depth = '[{"a":' * 3000 + "1" + "}]" * 3000
    return json.dumps(value).replace(json.dumps(_DEEP), depth).encode()


def spoiled(rng: random.Random, examples: Sequence[bytes]) -> bytes:
    """One of the examples, changed as data if it is JSON, else, or now and then also, byte by byte."""
    data = rng.choice(examples)
    if data[:1] in (b"{", b"[") and b"\n" not in data and rng.random() < 0.7:
        data = _document(
            functools.reduce(lambda value, _: _changed(rng, value), range(rng.randint(1, 3)), json.loads(data))
        )
        if rng.random() < 0.8:
            return data
    for _ in range(rng.randint(1, 4)):
        at, to = sorted(rng.choices(range(len(data) + 1), k=2))
        match rng.randrange(5):
            case 0:
                data = data[:at]
            case 1:
                data = data[:at] + rng.choice(PIECES) + data[min(to, at + 8) :]
            case 2:
                data = data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:]
            case 3:
                data = data[:at] + data[at:to][:2000] * 2 + data[to:]
            case _:
                data = data[:at] + bytes(byte ^ 1 << rng.randrange(8) for byte in data[at : at + 2]) + data[at + 2 :]
    return data


# --- the endpoint


@functools.cache
def _tokens() -> ChatTokens:
    from trainers.model.warmup import character_tokenizer

    return ChatTokens(character_tokenizer(set(string.printable)))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Where the endpoint serves, for all of its tests."""
    return asyncio.new_event_loop()


@functools.cache
def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=60.0)


def _post(path: str) -> Callable[[bytes, Path], object]:
    async def post(body: bytes) -> None:
        words = [*_tokens().tokenizer('[add {"a": 1}]')["input_ids"], _tokens().end_id]
        async with agent_endpoint().session(a_chat(_tokens(), ScriptedEngine(lambda *_: words))) as session:
            headers = {"authorization": f"Bearer {session.key}", "content-type": "application/json"}
            response = await _client().post(f"{agent_endpoint().base_url}/{path}", content=body, headers=headers)
        assert response.status_code < 500, response.text
        if response.status_code != 200:
            assert response.json()["error"]["message"]

    return lambda body, _: _loop().run_until_complete(post(body))


def _chats() -> list[bytes]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "2"}]},
    ]
    formatted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    bodies: list[dict[str, Any]] = [
        {"messages": messages, "model": "m", "stream": True, "stream_options": {"include_usage": True}},
        {"messages": messages, "tools": [ADD], "tool_choice": "auto", "max_tokens": 8, "stop": ["x"], "logprobs": True},
        {"messages": [*messages, {"role": "assistant", "tool_calls": [call]}], "response_format": formatted},
        {"messages": messages, "temperature": 1.0, "n": 1, "logit_bias": {}, "parallel_tool_calls": False},
    ]
    return [json.dumps(body).encode() for body in bodies]


def _responses() -> list[bytes]:
    items = [
        {"role": "user", "content": "2"},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
    ]
    items += [{"type": "function_call_output", "call_id": "1", "output": "3"}, {"type": "reasoning", "summary": []}]
    bodies: list[dict[str, Any]] = [
        {"input": "2", "instructions": "Be brief.", "previous_response_id": "r", "stream": True},
        {"input": items, "tools": [{"type": "function", **ADD["function"]}], "text": {"format": {"type": "text"}}},
    ]
    return [json.dumps(body).encode() for body in bodies]


# --- calls of tools, in the reply and in their arguments


@tool
def add(a: int, b: list[float] | None = None, c: dict[str, str] | None = None) -> str:
    """Add."""
    return str(a)


def _call(arguments: bytes, _: Path) -> None:
    request = CallRequest(id="1", name="add", arguments=arguments.decode(errors="replace"))
    [made], unavailable = asyncio.run(run_calls([request], [add], timeout=10.0, output_chars=100))
    assert made.result and unavailable is None


class _Whole(Brackets):
    """Takes the first reply for the arguments of a call."""

    async def parse(self, text: str, tools: Any) -> ParsedReply:
        self.count += 1
        calls = [CallRequest(id="1", name="add", arguments=text)] if self.count == 1 else []
        return ParsedReply(content="" if calls else text, tool_calls=calls)


@functools.cache
def _qwen() -> ChatTokens:
    return ChatTokens(tokenizer_of("qwen3.5"))


def _conversation(written: bytes, _: Path) -> None:
    tokens, replies = _qwen(), [written.decode(errors="replace"), "done"]
    engine = ScriptedEngine(lambda *_: [*tokens.tokenizer.encode(replies.pop(0)), tokens.end_id])
    chat = a_chat(tokens, engine, max_tokens=2**20, max_model_len=2**24, tool_parser=_Whole())
    asyncio.run(chat.ask("2+2?", tools=[add]))
    assert [len(turn.tool_calls) for turn in chat.turns] == [1, 0]
    tokens.prompt(chat.messages, tools=[add.schema])


class _Hermes:
    """What vLLM's parsers do, that find all calls or raise."""

    tool_call_start_token = "<tool_call>"

    def extract_tool_calls(self, text: str, request: object) -> Any:
        from types import SimpleNamespace as Some

        found = [json.loads(each) for each in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)]
        functions = [Some(name=each["name"], arguments=json.dumps(each["arguments"])) for each in found]
        calls = [Some(id="1", function=function) for function in functions]
        return Some(tools_called=bool(calls), tool_calls=calls, content=text.partition("<tool_call>")[0])


def _reply(text: bytes, _: Path) -> None:
    parsed = _read(text.decode(errors="replace"), _Hermes(), None)
    json.dumps([parsed.content, *(call.arguments for call in parsed.tool_calls)]).encode()


# --- files and entries


def _entries() -> list[bytes]:
    store = MemoryStore()
    log = a_log(store)
    commit(log, "s0", a_group(0))
    log.refresh()
    log.append(a_step(log.state, trained=["0.task0"]))
    return [re.sub(rb'"number":\d+', b'"number":0', data) for key, data in store.files.items() if "/log/" in key]


def _in_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    def parse(data: bytes, folder: Path) -> object:
        (folder / name).write_bytes(data)
        return read(folder / name)

    return parse


def _lines() -> list[bytes]:
    rows: list[dict[str, Any]] = [{"prompt": "2+2?", "answer": "4", "deep": {"x": [1]}}, {"prompt": "é", "answer": 5}]
    lines = [json.dumps(row) for row in rows]
    return [*(line.encode() for line in lines), "\n".join(lines).encode(), "\n".join(lines).encode("utf-16")]


def _parquet() -> list[bytes]:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": ["2+2?"] * 20, "answer": ["4"] * 20}), sink)
    return [sink.getvalue().to_pybytes()]


_rows = functools.partial(read_rows, required=["prompt", "answer"])
_PASSAGES = [
    b'{"id": "1", "title": "T", "text": "Some text."}',
    b'{"_id": 2, "contents": "\\"T\\"\\nText"}\n{"id": "3", "text": "x"}',
]


# --- other servers


def _completion(**changes: Any) -> bytes:
    message = {"role": "assistant", "content": '{"score": 8.5}', "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    return json.dumps(
        {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]} | changes
    ).encode()


_EVENTS = [
    b'data: {"id": "1", "choices": [{"index": 0, "delta": {"content": "8"}}]}\n\ndata: [DONE]\n\n',
    b"event: error\ndata: {}\n\n",
]


def _judge(kind: str, **options: Any) -> Callable[[bytes, Path], object]:
    async def ask(body: bytes) -> None:
        reply = httpx.Response(200, content=body, headers={"content-type": kind})
        judge = Judge(base_url="http://judge/v1", model="m", retries=0, first_delay=0.0, options=options)
        http = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: reply))
        client = openai.AsyncOpenAI(base_url="http://judge/v1", api_key="none", max_retries=0, http_client=http)
        object.__setattr__(judge, "_client", lambda: client)
        score = await judge("2+2?", "4")
        assert score.reward is not None and 0 <= score.reward <= 1

    return lambda body, _: asyncio.run(ask(body))


# --- replies, as rewards read them


def _text(*rewards: Callable[[str], object]) -> Callable[[bytes, Path], object]:
    def parse(data: bytes, _: Path) -> None:
        for reward in rewards:
            value = reward(data.decode(errors="replace"))
            assert not isinstance(value, float) or value in (0.0, 1.0) or reward is verdict_in

    return parse


class _Endless(BaseException):
    """It ran for seconds; `math_answer` says that it may, and its process is killed."""


def _mathematical(data: bytes, _: Path) -> None:
    def end(*_: object) -> None:
        raise _Endless

    signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, 3.0)
    try:
        assert math_answer(data.decode(errors="replace"), "3/4") in (0.0, 1.0)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


_REPLIES = [
    rb"So \boxed{\frac{3}{4}}.",
    b"#### 1,234.50",
    b"The answer is **42**.",
    b"<think>x</think> $x^2 + 1$",
    b"x = 3/4 cm",
]
_BLOCKS = [b"```python\ndef f(x):\n    return x\n```", b"> ~~~py\n> print(1)\n> ~~~\n\ntext\n- ```\n  x\n  ```"]
_TESTS = [
    *(b'[{"input": "2 3", "output": "5"}]', b'{"inputs": ["1"], "outputs": ["2"], "fn_name": "f"}'),
    *(b'["assert f(1) == 1", "assert f(2) == 2"]', b"def test_f():\n    assert f(1) == 1\n\nassert f(2) == 2"),
]


def _seals() -> list[bytes]:
    return [json.dumps({"weights_sha256": "0" * 64, "files": {"model.safetensors": "f" * 64}}).encode()]


def _rewards() -> list[bytes]:
    columns = {field.name: pa.nulls(3, field.type) for field in REWARDS}
    return [ipc_bytes(pa.table(columns, schema=REWARDS), compression="zstd")]


def _shards() -> list[bytes]:
    return [encode_shard([a_group(0), a_group(1)], provenance=provenance(), sampling=SAMPLING)]


PARSERS = {
    "chat completions": Parser(_chats, _post("chat/completions"), share=0.5),
    "responses": Parser(_responses, _post("responses"), share=0.5),
    "posted reward": Parser(
        lambda: [b'{"reward": 0.5, "parts": {"a": 1, "b": null}}'], _post("sessions/reward"), share=0.3
    ),
    "arguments of a call": Parser(lambda: [b'{"a": 1, "b": [1, 2.5], "c": {"x": "y"}}'], _call),
    "arguments in a conversation": Parser(
        lambda: [b'{"a": 1, "b": [1, 2.5], "c": {"x": "y"}}'], _conversation, share=0.3
    ),
    "reply with calls": Parser(
        lambda: [b'Hm. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'] * 2, _reply
    ),
    "log entry": Parser(_entries, lambda data, _: decode_entry(data, number=0), (ValueError, KeyError, TypeError)),
    "shard": Parser(_shards, lambda data, _: decode_shard(data, name="s"), (BadShard,)),
    "rewards of a shard": Parser(
        _rewards, lambda data, _: _decode(data, log=RunLog(MemoryStore(), "run"), key="k"), (DamagedRewards,)
    ),
    "seal": Parser(_seals, _in_file(DIGEST_FILE, lambda file: read_seal(file.parent)), (DigestMismatch,)),
    "run file": Parser(lambda: [as_toml(a_config()).encode()], _in_file("run.toml", load_run_file), (InvalidInput,)),
    "rows": Parser(_lines, _in_file("rows.jsonl", _rows), (InvalidInput,)),
    "packed rows": Parser(lambda: [gzip.compress(x) for x in _lines()], _in_file("r.jsonl.gz", _rows), (InvalidInput,)),
    "parquet": Parser(_parquet, _in_file("rows.parquet", _rows), (InvalidInput,)),
    "passages": Parser(lambda: _PASSAGES, _in_file("p.jsonl", lambda file: [*read_passages(file)]), (BadCorpus,)),
    "judge": Parser(lambda: [_completion()], _judge("application/json"), (RewardFailed,), share=0.3),
    "judge's stream": Parser(lambda: _EVENTS, _judge("text/event-stream", stream=True), (RewardFailed,), share=0.3),
    "verdict": Parser(lambda: [b'{"score": 8.5, "reason": "x"}', b"Score: 7/10"], _text(verdict_in)),
    "answer": Parser(
        lambda: _REPLIES,
        _text(final_answer, *(functools.partial(f, answer="42") for f in (gsm8k, exact)), lambda r: matches(r, "4+2")),
    ),
    "mathematical answer": Parser(lambda: _REPLIES, _mathematical, (_Endless,), share=0.1),
    "code block": Parser(lambda: _BLOCKS, _text(python_block)),
    "tests of code": Parser(lambda: _TESTS, _text(read_tests), (InvalidInput,)),
}


def _fuzz(name: str, folder: Path, count: int, *, first: int = 0) -> None:
    parser = PARSERS[name]
    examples = parser.examples()
    for seed in range(first, first + max(20, int(count * parser.share))):
        data = spoiled(random.Random(f"{name} {seed}"), examples)
        started = time.monotonic()
        try:
            parser.parse(data, folder)
        except parser.may_raise:
            pass
        except BaseException as error:
            error.add_note(f"{name}, seed {seed}: {data[:300]!r}")
            raise
        assert time.monotonic() - started < MOST_SECONDS, f"{name}, seed {seed}: {data[:300]!r}"


@pytest.mark.parametrize("name", PARSERS)
def test_what_others_wrote_is_read_or_refused_in_the_parsers_own_words(name: str, tmp_path: Path):
    for example in PARSERS[name].examples() if name != "judge's stream" else []:
        PARSERS[name].parse(example, tmp_path)
    _fuzz(name, tmp_path, 100)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_the_same_for_many_thousand_inputs(name: str, tmp_path: Path):
    _fuzz(name, tmp_path, 20_000, first=1_000_000)
