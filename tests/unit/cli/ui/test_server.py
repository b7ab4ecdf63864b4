"""The page's server: its values, who may ask, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from cli.traj.coloring import by_logprob
from cli.ui.server import COOKIE, create_app
from storage.log.entries import Alias, End, Quarantine, Session
from storage.log.run_log import RunLog
from storage.log.runs import create_run, remove_run, trainer_lock
from storage.objects.object_store import LocalStore
from storage.objects.opening import open_store
from tests.builders import BASE, a_group, a_log, a_shard, a_step, a_summary, a_trajectory, a_turn
from tests.faulty_s3 import ALWAYS, Fault, FaultyS3
from tests.unit.cli.builders import an_evaluation, assert_refused, commit, running
from tests.unit.cli.ui.builders import NASTY, a_trained_run, seen, train

HEADER = {"X-Millrace": "ui"}
Get = Callable[..., Any]


@pytest.fixture
def client(store: LocalStore) -> TestClient:
    return TestClient(create_app(store), base_url="http://localhost:4300", raise_server_exceptions=False)


@pytest.fixture
def get(client: TestClient) -> Get:
    """The answer to `/api/PATH?…`, which must have the status."""

    def ask(path: str, status: int = 200, /, **asked: str) -> Any:
        answer = client.get(f"/api/{path}", params=asked)
        assert answer.status_code == status, answer.text
        return answer.json() if status == 200 else answer.json()["error"]

    return ask


def test_every_run_is_a_line_and_a_damaged_one_says_why(store: LocalStore, get: Get) -> None:
    failed = create_run(store, "failed", {})
    for body in (Session(id="s", code_version="", steps=5), End(session_id="s", outcome="failed", reason="no")):
        failed.append(body)
    trained = a_trained_run(store)
    trained.append(Alias(name="champion", version=1, checksum="sum"))
    create_run(store, "damaged", {}).append(BASE)
    store.put(f"runs/damaged/log/{0:020d}.json", b"{")
    create_run(store, "no-json", {})
    store.put("runs/no-json/run.json", b"{")
    with trainer_lock(trained):
        runs = {run["run"]: run for run in get("runs")["runs"]}
    assert list(runs)[0] == "run" and runs["run"]["training"] and runs["run"]["step"] == 2
    assert (runs["failed"]["outcome"], runs["failed"]["reason"]) == ("failed", "no")
    assert runs["run"]["before"]["score"] == pytest.approx(1 / 3) and runs["run"]["champion"] == 1
    assert runs["run"]["after"]["text"] == "held-out 0.667 on 3 tasks, 1.0 s" and runs["run"]["trajectories"] == 6
    assert f"runs/damaged/log/{0:020d}.json cannot be read" in runs["damaged"]["damaged"]
    assert "JSONDecodeError" in runs["no-json"]["damaged"]
    assert "cannot be read" in get("runs/damaged/overview", 400) and "no run 'nothing'" in get(
        "runs/nothing/steps", 404
    )
    store.put(f"runs/damaged/log/{0:020d}.json", trained.store.get(f"runs/run/log/{0:020d}.json"))
    assert not {run["run"]: run for run in get("runs")["runs"]}["damaged"]["damaged"], "once it is mended"


def test_a_page_that_follows_gets_what_is_new_and_else_nothing(client: TestClient, store: LocalStore) -> None:
    log = a_trained_run(store)
    first = client.get("/api/runs/run/steps")
    tag = {"If-None-Match": first.headers["etag"]}
    assert client.get("/api/runs/run/steps", headers=tag).status_code == 304
    commit(log, "s2", seen("c", 2, version=2))
    train(log, "2.c", loss=4.0, fresh=7.0)
    part = client.get("/api/runs/run/steps?first=2&width=1", headers=tag).json()
    assert (part["first"], part["spans"]) == (2, [[3, 3]])
    assert part["metrics"]["loss"]["mean"] == [4.0] and part["metrics"]["fresh"]["mean"] == [7.0]
    assert client.get("/api/runs/run/overview").json()["step"] == 3
    remove_run(log)
    a_log(store)
    assert client.get("/api/runs/run/overview").json()["step"] == 0, "another run of that name"


@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        ({}, ["1.a/0", "1.a/1", "0.b/0", "0.b/1", "0.a/0", "0.a/1"]),
        ({"step": "1"}, ["0.a/0", "0.a/1"]),
        ({"step": "2.."}, ["1.a/0", "1.a/1", "0.b/0", "0.b/1"]),
        ({"reward": ">=0.5"}, ["1.a/0", "0.b/0"]),
        ({"status": "truncated"}, []),
        ({"length": ">2"}, []),
        ({"length": "2", "step": "1", "reward": "0"}, ["0.a/0", "0.a/1"]),
        ({"held_out": "1", "reward": "1", "step": ""}, ["2.q2/0", "2.q1/0", "1.a/0", "0.b/0", "0.q2/0"]),
        ({"environment": "a"}, []),
    ],
    ids=str,
)
def test_trajectories_are_filtered(store: LocalStore, get: Get, asked: dict[str, str], ids: list[str]) -> None:
    a_trained_run(store)
    found = get("runs/run/trajectories", **asked)
    assert [row["id"] for row in found["rows"]] == ids and found["next"] is None


def test_a_list_goes_on_where_it_ended(store: LocalStore, get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    log = a_log(store)
    for number in range(3):
        commit(log, f"s{number}", *(a_group(10 * number + place) for place in range(3)))
    monkeypatch.setattr("cli.ui.search.MOST_ROWS", 4)
    monkeypatch.setattr("cli.ui.search._SHARDS_AT_ONCE", 2)
    ids, after, calls = list[str](), "", 0
    while after is not None:
        found = get("runs/run/trajectories", after=after)
        ids, after, calls = ids + [row["id"] for row in found["rows"]], found["next"], calls + 1
    assert calls == 5 and len(ids) == len(set(ids)) == 18
    assert ids == [
        f"0.task{10 * shard + place}/{attempt}" for shard in (2, 1, 0) for place in (2, 1, 0) for attempt in (0, 1)
    ]


def test_filters_that_cannot_be_read_are_sentences(store: LocalStore, get: Get) -> None:
    a_trained_run(store)
    refused = {
        "step=3": "the run has steps 1 to 2", "step=x": "write a step or a range", "reward=~1": "write a comparison",
        "length=long": "write a comparison of sampled tokens", "status=x": "ended in one of", "sql=1": "no filter sql",
    }  # fmt: skip
    for pair, sentence in refused.items():
        name, _, value = pair.partition("=")
        assert sentence in get("runs/run/trajectories", 400, **{name: value})
    assert "has no group 'x'" in get("runs/run/trajectory", 400, id="x/0")
    assert "write one of logprob" in get("runs/run/trajectory", 400, id="0.a/0", color="pink")
    assert "there is no page" in get("runs/run/nothing", 404)


def test_text_is_searched_once_there_is_an_index(client: TestClient, store: LocalStore, get: Get) -> None:
    log = a_log(store)
    commit(log, "s0", seen("a", 0, text="carry the one"), seen("b", 0, text="carry nothing", rewards=[1.0, 1.0]))
    train(log, "0.a", "0.b")
    assert get("runs/run/index") == {"behind": None}
    assert "has no search index" in get("runs/run/trajectories", 404, words="carry")
    assert client.post("/api/runs/run/index", headers=HEADER, json={}).json() == {"trajectories": 4}
    assert {row["id"] for row in get("runs/run/trajectories", words="carry", reward="1")["rows"]} == {
        "0.a/0",
        "0.b/0",
        "0.b/1",
    }
    [row] = get("runs/run/trajectories", words='"the one"', reward="<1")["rows"]
    assert (row["id"], row["prompt"], row["reply"], row["step"]) == ("0.a/1", "carry the one", "7", 1)
    assert get("runs/run/index") == {"behind": 0}
    commit(log, "s1", seen("c", 1))
    assert get("runs/run/index") == {"behind": 1}


def test_an_attempt_is_a_conversation_in_the_colours_of_traj_show(store: LocalStore, get: Get) -> None:
    log = a_log(store)
    turns = [a_turn(logprobs=[-0.1, -2.0], versions=[0, 1])]
    failed = a_trajectory(None, attempt=1, status="env_error", error="KeyError: 'x'\n  at my/env.py:3 in run: f()")
    commit(log, "s0", a_group(0, trajectories=[a_trajectory(turns=turns), failed]))
    [row] = get("runs/run/trajectory", id="0.task0/0")["sequences"]
    said = row["messages"][1]["tokens"]
    expected = by_logprob({"logprobs": [-0.1, -2.0], "weight_versions": [0, 1]})
    assert said["styles"] == expected.styles == ["green", "red"] and said["values"] == expected.values
    assert said["logprobs"] == [-0.1, -2.0] and said["versions"] == [0, 1] and said["texts"] == ["#12 ", "#1 "]
    assert row["legend"][:2] == [["■", "green"], [" > −0.2  ", "none"]] or row["legend"][0] == ["■", "green"]
    by_version = get("runs/run/trajectory", id="0.task0/0", color="version")["sequences"][0]
    assert by_version["messages"][1]["tokens"]["styles"] == ["cyan", "magenta"] and by_version["color"] == "version"
    assert get("runs/run/trajectory", id="0.task0/1")["error"].startswith("KeyError: 'x'\n  at my/env.py:3")
    [failure] = get("runs/run/trajectories", status="failed")["rows"]
    assert failure["id"] == "0.task0/1" and failure["status"] == "env_error"


@pytest.fixture
def gated(store: LocalStore) -> RunLog:
    """A run whose first step is fine and whose second has too large a gap."""
    log = create_run(store, "run", {"train": {"max_gap": 0.5}})
    log.append(BASE)
    for number, gap in ((1, 0.0), (2, 0.7)):
        log.append(a_shard(f"s{number}", [a_summary(number, version=number - 1)]))
        metrics = {"loss": 0.5, "engine_gap": gap}
        log.append(dataclasses.replace(a_step(log.state, trained=[f"0.task{number}"]), metrics=metrics))
    log.append(an_evaluation(1, 0.75))
    return log


def test_lineage_is_the_logs_and_promotion_goes_through_its_gate(gated: RunLog, client: TestClient, get: Get) -> None:
    newest = get("runs/run/lineage")
    assert newest["version"] == 2 and newest["step"] == 2 and newest["sampled_by"] == [1] and newest["children"] == []
    assert [(shard["id"], shard["groups"], shard["sampled_by"]) for shard in newest["shards"]] == [("s2", 1, [1])]
    assert "differed by 0.7 nats per token" in newest["problems"][0] and newest["choices"] == [2, 1, 0]
    refused = client.post("/api/runs/run/promote", headers=HEADER, json={"version": 2})
    assert refused.status_code == 409 and "differed by 0.7 nats" in refused.json()["error"]
    assert "champion" not in gated.refresh().aliases
    first = get("runs/run/lineage", version="1")
    assert first["problems"] == [] and first["scores"][0]["score"] == 0.75 and first["children"] == [2]
    with trainer_lock(gated):
        done = client.post("/api/runs/run/promote", headers=HEADER, json={"version": 1}).json()
    assert done == {
        "champion": 1,
        "mlflow": "the run is being trained, which brings the alias there with its next step",
    }
    assert gated.refresh().aliases["champion"].version == 1 and get("runs/run/lineage")["champion"] == 1
    gated.append(Quarantine(shard_id="s1", reason="a disk broke"))
    assert "no policy version 9" in get("runs/run/lineage", 400, version="9")


def test_only_its_own_hosts_and_pages_are_answered(gated: RunLog, store: LocalStore) -> None:
    """A name that is pointed at this machine, a form of another site, and a request without the token."""
    path, ours = "/api/runs/run/promote", "http://localhost:4300"
    client = TestClient(create_app(store), base_url=ours)
    for host, status in {
        "localhost:4300": 200,
        "127.0.0.1": 200,
        "[::1]:80": 200,
        "evil.example:4300": 421,
        "": 421,
    }.items():
        assert client.get("/api/runs", headers={"Host": host}).status_code == status, host
    crossing = [{}, {**HEADER, "Origin": "http://evil.example"}, {**HEADER, "Origin": "null"}]
    assert [client.post(path, json={"version": 1}, headers=each).status_code for each in crossing] == [403] * 3
    form = {**HEADER, "Origin": ours, "Content-Type": "text/plain"}
    assert client.post(path, content='{"version": 1}', headers=form).status_code == 422
    assert client.post(path, json={"version": True}, headers={**HEADER, "Origin": ours}).status_code == 422
    assert "champion" not in gated.refresh().aliases
    headers = client.get("/").headers
    assert headers["x-frame-options"] == "DENY" and headers["x-content-type-options"] == "nosniff"
    assert (
        "access-control-allow-origin" not in client.get("/api/runs", headers={"Origin": "http://evil.example"}).headers
    )


@pytest.mark.parametrize("part", ["overview", "steps", "lineage", "contents", "trajectory", "trajectories", "index"])
def test_what_a_part_cannot_be_asked_is_a_sentence(store: LocalStore, get: Get, part: str) -> None:
    """Also names that our own functions give to what they are called with."""
    a_trained_run(store)
    for name in ("self", "run", "part", "watched", "opened", "nothing"):
        assert get(f"runs/run/{part}", 400, **{name: "1"}) == f"there is no filter {name}"


def test_requests_that_no_page_of_ours_makes_are_refused(client: TestClient, store: LocalStore) -> None:
    """Numbers that Python does not read, hosts and origins that are no address, bodies that are no JSON or endless."""
    a_trained_run(store)
    digits, promote = "9" * 5000, "/api/runs/run/promote"
    for asked in (
        "steps?first=",
        "lineage?version=",
        "lineage?version=²",
        "trajectories?step=",
        "trajectories?length=",
    ):
        number = "" if asked.endswith("²") else digits
        assert client.get(f"/api/runs/run/{asked}{number}").status_code == 400, asked
    assert client.get("/api/runs", headers={"Host": "[::1"}).status_code == 421
    assert client.post(promote, json={"version": 1}, headers={**HEADER, "Origin": "http://[::1"}).status_code == 403
    for body, status in {
        '{"version": NaN}': 422,
        '{"version": 1e400}': 422,
        '{"version": "\\ud800"}': 422,
        '{"version": ' + digits + "}": 400,
        "[" * 20_000: 413,
    }.items():
        answer = client.post(promote, content=body, headers={**HEADER, "Content-Type": "application/json"})
        assert answer.status_code == status, body[:20]
    answer = client.post(promote, content='{"version": []}', headers={**HEADER, "Content-Type": "application/json"})
    assert answer.json() == {"error": "body.version: Input should be a valid integer"}
    endless = client.post("/api/login", content=iter([b" " * 20_000]), headers=HEADER)
    assert endless.status_code == 413, "no length is said"


def test_with_a_token_nothing_is_told_without_it(
    gated: RunLog, store: LocalStore, capfd: pytest.CaptureFixture[str]
) -> None:
    token = "a-long-random-token"
    client = TestClient(create_app(store, host="0.0.0.0", token=token), base_url="http://10.0.0.5:4300")
    assert client.get("/").status_code == 200 and "run" not in client.get("/plotly.js").text[:100]
    for path in ("/api/runs", "/api/runs/run/overview", "/api/metrics"):
        assert client.get(path).status_code == client.get(f"{path}?token={token}").status_code == 401
    assert client.post("/api/runs/run/promote", json={"version": 1}, headers=HEADER).status_code == 401
    bearer = {"Authorization": f"Bearer {token}"}
    assert client.get("/api/runs", headers=bearer).status_code == 200
    assert client.get("/api/runs", headers={"Host": "evil.example", **bearer}).status_code == 421
    assert client.post("/api/login", json={"token": "wrong"}, headers=HEADER).status_code == 401
    answer = client.post("/api/login", json={"token": token}, headers=HEADER)
    assert re.search(f"{COOKIE}=.*HttpOnly.*SameSite=strict", answer.headers["set-cookie"])
    assert client.get("/api/runs").status_code == 200, "by the cookie"
    assert token not in "".join(capfd.readouterr())


def test_the_command_serves_until_it_is_interrupted(store: LocalStore, home: Path) -> None:
    a_trained_run(store)
    with running("-m", "cli.main", "ui", "run", "--port", "0", "--no-browser") as process:
        address = re.search(r"(http://127\.0\.0\.1:\d+/)#run=run", process.stdout.readline())
        assert address is not None
        assert httpx.get(f"{address[1]}api/runs").json()["runs"][0]["run"] == "run"
        process.send_signal(2)
        assert process.wait(timeout=30) == 0
    with running("-m", "cli.main", "ui", "--port", "0", "--host", "0.0.0.0", "--no-browser") as process:
        line = process.stdout.readline()
        found = re.search(r"http://\S+:(\d+)/#token=(\S{32,})", line)
        assert found is not None
        local = f"http://127.0.0.1:{found[1]}/api/runs"
        assert httpx.get(local).status_code == 401
        assert httpx.get(local, headers={"Authorization": f"Bearer {found[2]}"}).status_code == 200
        process.send_signal(2)
        assert found[2] not in process.communicate(timeout=30)[1]


def test_what_cannot_be_served_is_one_sentence(store: LocalStore) -> None:
    a_trained_run(store)
    refused = {"nothing": "no run 'nothing'", "--host 203.0.113.1": "cannot listen on 203.0.113.1"}
    assert_refused("ui --no-browser {}", refused | {"--host ''": "0.0.0.0 listens on all"})


@pytest.mark.server
def test_a_store_that_is_away_is_a_sentence_and_is_served_when_it_is_back(
    server: dict[str, str], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with FaultyS3(server).running() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.variables["AWS_ENDPOINT_URL"])
        store = open_store(f"s3://{bucket}/lake", patience=0.5)
        a_log(store)
        client = TestClient(create_app(store), base_url="http://localhost:4300")
        assert client.get("/api/runs").json()["runs"][0]["run"] == "run"
        proxy.fail(Fault.LOSE_ANSWER, times=ALWAYS, method="GET")
        for path in ("runs", "runs/run/overview", "runs/run/groups"):
            answer = client.get(f"/api/{path}")
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"].startswith(f"store {store.uri}: cannot "), answer.text
        proxy.heal()
        assert client.get("/api/runs/run/overview").json()["outcome"]


def test_untrusted_text_is_json_and_nothing_else(client: TestClient, store: LocalStore) -> None:
    a_trained_run(store)
    answer = client.get("/api/runs/run/trajectory", params={"id": "0.a/0"})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["sequences"][0]["messages"][0]["content"] == NASTY
