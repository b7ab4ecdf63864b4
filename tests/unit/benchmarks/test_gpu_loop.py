"""What the GPU loop's benchmark plans, counts and holds against its bars; its runs are for a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_loop
from benchmarks.gpu_loop import (
    GIB,
    MODES,
    Coin,
    Report,
    Work,
    bars,
    by_side,
    parsed,
    run_mode,
    summarise,
    toss,
    when_the_other_has_most,
)
from settings.run_file import load_run_file
from tasks.checks.gpu_share import share_of


def _work(**values: Any) -> Work:
    sizes: dict[str, Any] = {"shape": "0.6B", "rounds": 6, "prompts": 64, "attempts": 8, "max_tokens": 512}
    return Work(**{**sizes, "on_gpu": True, **values})


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_is_a_run_file_that_shares_one_gpu_as_its_name_says(mode: str, tmp_path: Path) -> None:
    config = load_run_file({"workflow": "benchmarks.gpu_loop:Coin"}, _work().run_file(mode, tmp_path))
    assert share_of(config, 1) == mode.partition("-")[0] and config.max_staleness == int(mode.partition("-")[2])
    assert (config.steps, config.batch_size, config.n_samples, config.sampling.max_tokens) == (6, 64, 8, 512)


def test_on_a_cpu_nothing_is_shared(tmp_path: Path) -> None:
    work = _work(on_gpu=False, shape="tiny")
    assert work.modes == ["split-0", "split-1"] and _work().modes == list(MODES)
    config = load_run_file({"workflow": "benchmarks.gpu_loop:Coin"}, work.run_file("split-1", tmp_path))
    assert config.engine.share == "auto" and config.max_staleness == 1


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed([]).rounds == 6 and parsed(["--mode", "trl", "--mode", "split-0"]).mode == ["trl", "split-0"]
    for arguments, reason in (
        (["--rounds", "2"], "--rounds 2: the first 2 are not counted"),
        (["--device", "cpu", "--mode", "phases-0"], "phases-0 and trl share a GPU"),
        (["--mode", "phases-1"], "invalid choice"),
    ):
        with pytest.raises(SystemExit):
            parsed(arguments)
        assert reason in capsys.readouterr().err


def test_a_coin_gives_groups_a_signal() -> None:
    tasks = Coin().tasks("train")
    assert len({task.id for task in tasks}) == len(tasks) == 4096
    assert 0.4 < sum(toss(f"reply {number}") for number in range(1000)) / 1000 < 0.6


def test_memory_is_told_by_side_and_where_the_other_has_most() -> None:
    listed = "11, 2048\n12, 20480\n13, 999\n"
    held = by_side(listed, {11: "VLLM::EngineCore", 12: "ray::Host"})
    assert held == {"engine": 2 * GIB, "trainer": 20 * GIB}
    awake = {"engine": 60 * GIB, "trainer": GIB}
    assert when_the_other_has_most([awake, held, awake]) == {
        "engine_bytes": 60 * GIB,
        "trainer_bytes": 20 * GIB,
        "engine_bytes_while_training": 2 * GIB,
        "trainer_bytes_while_generating": GIB,
    }
    assert when_the_other_has_most([]) == {}
    assert when_the_other_has_most([{"engine": 0, "trainer": GIB}]) == {}, "nothing is known of an engine"


def _steps(seconds: float, **metrics: float) -> list[tuple[float, dict[str, float]]]:
    each = {"trained_tokens": 1000.0, "train_seconds": 2.0, "generate_seconds": 4.0, "engine_gap": 0.01, **metrics}
    return [(100.0 + seconds * number, each) for number in range(6)]


def test_a_mode_in_numbers() -> None:
    found = summarise(
        _steps(10.0, sleep_seconds=0.2, wake_seconds=0.3, mfu=0.4),
        [0.5, 0.7],
        {"engine_bytes": 5},
        _work(),
    )
    assert found["samples_per_second"] == pytest.approx(51.2) and found["round_seconds"] == 10.0
    assert (found["train_tokens_per_second"], found["generate_tokens_per_second"]) == (500.0, 250.0)
    assert found["mfu"] == 0.4 and found["publish_seconds"] == pytest.approx(0.6)
    assert found["turns_share_of_round"] == pytest.approx(0.05) and found["engine_bytes"] == 5


def test_bars_hold_or_are_missed() -> None:
    def mode(seconds: float, **metrics: float) -> dict[str, float]:
        memory = {"engine_bytes_while_training": GIB // 2}
        return summarise(_steps(seconds, **metrics), [0.5], memory, _work())

    good = bars({"split-0": mode(20), "phases-0": mode(12), "split-1": mode(12)}, cold_starts=(20, 20))
    assert len(good) == 7 and all(holds for _, holds in good.values())
    bad = bars({"split-0": mode(12), "phases-0": mode(12, wake_seconds=1.0), "split-1": mode(12)}, cold_starts=(19, 20))
    missed = {name for name, (_, holds) in bad.items() if not holds}
    assert len(missed) == 4, missed
    assert bars({"split-1": mode(1)}, cold_starts=(0, 0)) == {}
    unseen = summarise(_steps(12), [0.5], {}, _work())
    assert not any("sleeping engine" in name for name in bars({"phases-0": unseen}, cold_starts=(0, 0)))


def test_a_mode_that_fails_hides_no_other_and_the_file_has_what_is_known_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "loop.json"
    report = Report(parsed(["--json", str(file)]), _work())

    def fails() -> dict[str, float]:
        raise RuntimeError("phases-0 ended with 1")

    good = summarise(_steps(20), [0.5], {}, _work())
    assert not report.measure("phases-0", fails) and "phases-0 ended with 1" in capsys.readouterr().err
    assert json.loads(file.read_text())["failures"] == {"phases-0": "RuntimeError: phases-0 ended with 1"}
    assert report.measure("split-0", lambda: good)
    assert json.loads(file.read_text())["modes"] == {"split-0": good}


@pytest.mark.parametrize(("fault", "sentence"), [("exit", "ended with 3"), ("hang", "ended with nothing after 5 s")])
def test_a_run_that_fails_or_hangs_says_what_it_has_said(
    fault: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of packages that were brought along it has the path."""
    command = tmp_path / "python"
    end = "exit 3" if fault == "exit" else "exec tail -f /dev/null"
    command.write_text(f"#!/bin/sh\necho $PYTHONPATH $VLLM_CACHE_ROOT\n{end}\n")
    command.chmod(0o755)
    monkeypatch.setattr(gpu_loop.sys, "executable", str(command))
    monkeypatch.setenv("PYTHONPATH", "/brought/along")
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    with pytest.raises(RuntimeError, match=f"{sentence}:\n{gpu_loop.ROOT}:/brought/along {tmp_path}/caches/vllm"):
        run_mode(_work(on_gpu=False), "split-0", tmp_path / "model", tmp_path / "split-0", seconds=5)
