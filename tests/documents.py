"""The commands that the documents show, one by one, and who has run each of them.

In: README, docs/ and the READMEs of folders. Out: each command as text, those of our own programs as words; and for
each that no test types as it stands, the test that runs it in another form or what it needs that CI has not.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from cli.main import app

PROJECT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    [PROJECT / "README.md", *PROJECT.glob("docs/*.md"), *PROJECT.glob("infra/*.md"), *PROJECT.glob("examples/**/*.md")]
    + [*PROJECT.glob("requirements/*.md")]
)
README = PROJECT / "README.md"
TUTORIAL = PROJECT / "docs/tutorial.md"
SEARCH_AGENT = PROJECT / "examples/search_agent/README.md"

# ── What they show ──────────────────────────────────────────────────────────────────────────────────────────────────

_TOOLS = "millrace make prefect python python3 mlflow docker kubectl helm ray pip uv curl sudo"
_IN_BLOCKS_ONLY = "export umask cat echo cd cp git apt apt-get aws psql ssh openssl docker-worker/bin/pip"
_IN_BLOCKS_ONLY += " look/bin/pip look/bin/millrace"
_PATH = r"(?:\.venv/bin/|docker-worker/bin/)?"
_SET = r"(?:[A-Z_]+=\S+ )*"
_PROGRAM = re.compile(rf"^{_SET}{_PATH}(?:{'|'.join(f'{_TOOLS} {_IN_BLOCKS_ONLY}'.split())}) ")
_IN_A_SENTENCE = re.compile(rf"`({_SET}{_PATH}(?:{_TOOLS.replace(' ', '|')}) [^`]+)`")
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:\A|\n)\n((?: {4}.*\n)+)")
_OURS = re.compile(r"^(?:millrace|make|prefect|python -m) ")
_HERE = re.compile(r" <<(\w+)\n(?:.*\n)*?\1\n")


def shown(document: Path, *, sentences: bool = True) -> list[str]:
    """Every command of a document, one a line: without prompt, comment and `.venv/bin/`, but with `…` where it has one.

    A block whose first line is a command is all commands; of other blocks, which show what is printed, those lines that
    are commands.
    """
    text = document.read_text()
    fenced = [(language, block) for language, block in _FENCED.findall(text)]
    indented = [("", re.sub("^ {4}", "", block, flags=re.MULTILINE)) for block in _INDENTED.findall(text)]
    found = []
    for language, block in [*fenced, *indented]:
        if language not in ("", "sh", "bash", "console"):
            continue
        lines = [line.strip() for line in _HERE.sub("\n", block).replace("\\\n", " ").splitlines() if line.strip()]
        commands = bool(language) or bool(lines and _PROGRAM.match(lines[0]))
        found += [line for line in lines if commands or _PROGRAM.match(line)]
    found += _IN_A_SENTENCE.findall(_FENCED.sub("", text)) if sentences else []
    return [_plain(line) for line in found]


def block(document: Path, heading: str) -> list[str]:
    """The lines of the first block under a heading as they stand, comments and all."""
    text = document.read_text()
    match = _FENCED.search(text, text.index(f"\n## {heading}\n"))
    assert match is not None
    return match[2].splitlines()


def _plain(line: str) -> str:
    line = re.sub(r"\s+", " ", re.sub(r"\s+#\s.*$", "", line.strip().removeprefix("$ ")))
    return line.removesuffix(" &").replace(".venv/bin/", "")


def tutorial_files() -> dict[str, str]:
    """What the tutorial's reader writes into an empty folder, by file name."""
    blocks = _FENCED.findall(TUTORIAL.read_text())
    code = [block for language, block in blocks if language == "python"]
    (run_file,) = [block for language, block in blocks if language == "toml"]
    return {"letters.py": "\n\n".join(code), "letters.toml": run_file}


def sentences(document: Path) -> list[str]:
    """The sentences of a document, without code blocks, tables, headings and pictures. A piece of code is one word."""
    prose = re.sub(r"^(?:\||#|!\[).*$", "", _FENCED.sub("", document.read_text()), flags=re.MULTILINE)
    prose = re.sub(r"`[^`]+`", "code", re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", prose))
    paragraphs = [" ".join(text.split()) for text in re.split(r"\n\s*\n|\n(?=\* )", prose)]
    return [sentence for text in paragraphs for sentence in re.split(r"(?<=[.!?])\W* (?=\w|\*)", text) if sentence]


def commands(document: Path, *, sentences: bool = True) -> Iterator[list[str]]:
    """Words of every command of ours that has no gap, up to the first shell operator."""
    for line in shown(document, sentences=sentences):
        if _OURS.match(line) and "…" not in line and "..." not in line:
            words = shlex.split(line)
            yield words[: words.index("&&")] if "&&" in words else words


def refusal(words: list[str]) -> str:
    """What `millrace` says to a command that it cannot take, before it does anything; empty where it takes it."""
    command: Any = typer.main.get_command(app)
    context, arguments = None, list(words)
    try:
        while isinstance(command, TyperGroup):
            context = command.make_context(command.name, arguments, parent=context, allow_extra_args=True)
            name, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
        command.make_context(command.name, arguments, parent=context)
    except typer.Exit:
        return ""  # it asks for help
    except TyperException as error:
        return str(error)
    return ""


# ── Who has run them ────────────────────────────────────────────────────────────────────────────────────────────────

QUICK_START = (
    (README, "One command"),
    (README, "Where next"),
    (PROJECT / "docs/trajectories.md", "Every command about a run"),
    (PROJECT / "docs/deployment.md", "Laptop"),
)
"""Documents and headings whose first blocks a newcomer types, in this order."""
_ON_WORKERS = {"replay", "eval", "rollout"}
_IN_PROCESS = {"runs", "status", "report", "traj", "lineage", "rescore", "export", "promote", "rollback", "gc", "index"}
_IN_PROCESS |= {"pause", "resume"}


def quick_start() -> list[str]:
    """A newcomer's commands in their order; "test_the_quick_start_of_readme_works_from_top_to_bottom"."""
    return [_plain(line) for document, heading in QUICK_START for line in block(document, heading)]


def about_a_run(*, on_workers: bool) -> list[list[str]]:
    """Words of the commands that need a finished run and nothing else, in the documents' order.

    Those that start workers take seconds each, so they are here once, without those that the quick start types.
    """
    wanted = _ON_WORKERS if on_workers else _IN_PROCESS
    every = [words for document in DOCUMENTS for words in commands(document)]
    found = [w for w in every if w[0] == "millrace" and w[1] in wanted and not refusal(w[1:])]
    if not on_workers:
        return found
    typed = [shlex.split(line) for line in quick_start()]
    return [words for number, words in enumerate(found) if words not in found[:number] and words not in typed]


def of_the_corpus() -> list[str]:
    """What the search agent's page types to make, index and serve its two worlds, each server's `&` cut off."""
    return [line for line in shown(SEARCH_AGENT) if re.match(r"python -m examples\.search_agent\.[wr]|echo ", line)]


def trainings() -> list[list[str]]:
    """Words of every training of the documents."""
    found: list[list[str]] = []
    for words in (words for document in DOCUMENTS for words in commands(document)):
        if words[:2] == ["millrace", "train"] and len(words) > 2 and words not in found:
            found.append(words)
    return found


_QUICK = "test_the_quick_start_of_readme_works_from_top_to_bottom"
_POSTGRES = "test_a_deployed_training_leaves_its_state_in_postgres_and_its_shards_in_the_store"
_IDLE = "needs minutes of an idle machine"
COVERED_BY = {
    "make lint": ".ci/run",
    "make train RUNFILE=examples/smollm2/smollm2.toml": "needs the package with the model, and half an hour: "
    "test_the_reference_reply_wins_every_task",
    "millrace diff *": "test_the_first_thing_that_differs_is_named",
    "millrace sync *": "test_sync_brings_mlflow_up_to_the_log_or_says_what_it_lacks",
    "make audit-if-reachable": ".ci/run",
    "make quick ARGS=*": f"needs nothing but what `make quick` needs: {_QUICK}",
    "make test ARGS=*": f"needs nothing but what `make test` needs: {_QUICK}",
    "make test-all": "needs one or two hours; .ci/run runs all but the slow ones",
    "make train TORCH_CPU_INDEX=*": "needs an index of PyTorch's",
    "make train PIP_FIND_LINKS=*": "needs a folder of wheels",
    "make audit": ".ci/run, if the package index can be reached",
    "make soak": "test_growth_of_the_disk_and_of_a_process_is_judged_in_bytes",
    "make chaos": "test_every_fault_has_its_outcome_and_none_changes_the_weights",
    "make lock*": "needs uv, two package indexes and many minutes, and changes the lock",
    "make down && MILLRACE_NOTIFY=*": "needs a destination; a webhook of the test's own: "
    "test_a_notification_tells_of_a_policy_that_fails_its_gate_and_of_a_flow_run_that_fails",
    "millrace up": f"what `make up` runs: {_QUICK}",
    "millrace down": f"what `make down` runs: {_QUICK}",
    "millrace stop RUN": f"needs a training: {_QUICK}",
    "millrace produce RUN *": "test_producers_come_and_die_and_come_back_and_every_prompt_is_trained_once",
    "millrace train FILE key=value …": "test_overrides_are_toml_values_and_bare_words",
    "millrace rm RUN": "test_a_run_is_removed_for_good_after_a_question_and_not_while_it_is_trained",
    "millrace ui*": "test_the_command_serves_until_it_is_interrupted",
    "millrace config*": "test_a_table_a_key_and_all_of_them_are_listed",
    "millrace train *": "needs minutes of vLLM; up to its start: test_every_training_passes_its_dry_run",
    "RAY_ADDRESS=auto millrace train *": "needs a Ray cluster; one of two nodes: "
    "test_a_lost_node_costs_its_workers_and_nothing_that_was_committed",
    "export PREFECT_SERVER_DATABASE_CONNECTION_URL=*": f"needs PostgreSQL: {_POSTGRES}",
    "mlflow server *": f"needs PostgreSQL and a bucket; with the options of compose.yaml: {_POSTGRES}",
    "docker build *": "needs Docker; test_dockerfiles_copy_what_there_is_and_the_build_context_lets_through",
    "docker compose config": "needs Docker: test_compose_files_fit_the_compose_specification",
    "docker compose *": f"needs Docker; the same services as processes: {_POSTGRES}",
    "python3 -m venv docker-worker": "needs what the next command does; the Makefile makes .venv the same way",
    "python3 -m venv look": "needs what the next command does; test_a_command_that_looks_runs makes the same",
    "look/bin/pip install *": "needs a package index; the same packages: test_what_looking_needs_is_small",
    "look/bin/millrace ui *": "test_the_page_is_served",
    "python -m pip install -e *": "needs a package index; "
    "test_a_missing_tracker_is_refused_with_the_extra_that_brings_it",
    "pip install -e *": "needs a package index; test_a_missing_tracker_is_refused_with_the_extra_that_brings_it",
    "docker-worker/bin/pip install *": "needs a package index; its version of Prefect: "
    "test_the_docker_workers_prefect_is_that_of_the_lock",
    "docker-worker/bin/prefect worker start *": "needs Docker",
    "prefect work-pool create --base-job-template": "names the option alone: "
    "test_pools_take_their_templates_and_the_deploy_job_deploys_to_its_pool",
    "kubectl *": "needs kubectl and a cluster; test_manifests_fit_the_schema_of_kubernetes",
    "prefect deployment run 'train-grpo/train' -p run=my-run --*": "needs Kubernetes; of processes: "
    "test_deployment_runs_train_replay_produce_score_tidy_up_and_go_on",
    "ray up *": "needs machines with SSH; test_the_ray_launcher_takes_its_file",
    "ray attach *": "needs the cluster that `ray up` makes",
    "python -m infra.services.prefect_database": "test_the_schema_is_what_the_installed_prefects_migrations_make",
    "python -m benchmarks.bad_clients": f"{_IDLE}; the limits: test_each_limit_has_its_status",
    "python -m benchmarks.producers": f"{_IDLE}; its sums: test_only_attempts_committed_within_the_window_count",
    "python -m benchmarks.reproducible": "needs minutes of vLLM on an idle machine; that bits are equal: "
    "test_bits_do_not_depend_on_the_batch_of_a_reproducible_engine",
    "python -m benchmarks.rollout_speed": "needs minutes of vLLM on an idle machine",
    "python -m benchmarks.models": "needs minutes of vLLM; its page: "
    "test_the_page_is_that_of_the_results_and_says_their_versions",
    "python -m benchmarks.router_replay": "needs minutes of vLLM; one model of it: "
    "test_replayed_experts_bring_engine_and_trainer_together",
    "python -m benchmarks.trl_speed": "needs minutes of vLLM and TRL on an idle machine",
    "python -m benchmarks.long_context": f"{_IDLE}; what it compares is the same step: "
    "test_many_ranks_take_the_step_one_rank_takes",
    "python -m benchmarks.trainer_speed": f"{_IDLE}, also for one pair of steps",
    "python -m benchmarks.start_up --timeline": f"{_IDLE}; its timeline: "
    "test_a_timeline_has_what_took_long_with_its_depth_and_processor_time",
    "python -m benchmarks.trainer_kinds MODEL": f"{_IDLE}; its sums: "
    "test_the_seconds_of_a_step_are_counted_by_what_they_are_spent_on",
    "python -m benchmarks.episodes": f"{_IDLE}; it takes no smaller number",
    "python -m benchmarks.staleness": f"{_IDLE}; what it simulates: test_no_token_over_the_bound_is_trained",
    "python -m benchmarks.learning_curve search-agent *": f"needs the run that is drawn; of another: {_QUICK}",
    "python benchmarks/gpu_train_step.py": "needs a GPU; on CPUs, a tiny model: "
    "test_a_tiny_step_runs_with_torch_and_transformers_alone",
    "python benchmarks/gpu_loop.py *": "needs a GPU; what it runs: "
    "test_each_mode_is_a_run_file_that_shares_one_gpu_as_its_name_says",
    "python -m benchmarks.*": f"{_IDLE}; in seconds: test_a_benchmark_runs_in_its_smallest_form",
    "python -m examples.search_agent.prepare_hotpotqa *": "needs a data set; of two questions in its layout: "
    "test_hotpotqa_becomes_a_folder_the_agent_reads",
    "python -m examples.search_agent.prepare_browsecomp *": "needs a data set; of four questions in its layout: "
    "test_browsecomp_plus_becomes_a_folder_the_agent_reads",
    "OPENAI_API_KEY=… python examples/search_agent/program.py *": "needs a model to ask; a scripted one: "
    "test_a_program_gives_the_rows_that_the_agent_gives",
    "python -m pytest -m gpu": "needs a GPU; on a model of one: test_rounds_take_turns_and_the_memory_suffices",
    "python -m tests.api_page": "needs a page to write: test_the_reference_page_has_every_name_as_the_code_has_it",
    "python -m tests.configuration_page": "needs a page to write: test_the_page_has_every_key_as_the_settings_have_it",
    "python -m tests.gpus_page": "needs a page to write: test_the_page_says_of_the_usual_sizes_what_the_plan_says",
    "pip check": "test_what_pip_complains_about_is_what_the_locks_page_says",
}
"""Of a command that no test types as it stands (`*`: whatever follows), the test that runs it in a form of its own, or
what it needs that CI has not. The first pattern that fits a command counts."""
