"""Which experts each token was given, on vLLM's CPU build: imported by vLLM's core alone.

    a layer's router ─▶ rows of a step ─▶ by request, and by block of the cache ─▶ `CompletionOutput.routed_experts`

vLLM 0.32 has all parts of it and puts them into its newer model runner alone. Here the scheduler and the worker of the
older one, which its CPU build has, hand them their steps. A prompt's tokens that come from the cache have the routes
with which they were computed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.v1.core.sched.scheduler import Scheduler


class RoutingScheduler(Scheduler):
    """vLLM's scheduler, which expects the routes of what it has scheduled."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if not self.cache_config.enable_prefix_caching:
            raise ValueError(
                "train.router_replay: vLLM keeps routes by blocks of its prefix cache, and has none for this model; "
                "leave it out"
            )
        self.aux_output_connector = AuxOutputSchedulerConnector()


def capture_routes(worker: Any) -> None:
    """Let what a worker computes come with its routes."""
    runner = worker.model_runner
    connector = get_aux_output_connector(runner.get_model(), worker.vllm_config, runner.kv_cache_config)
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens
    drafts: dict[str, list[int]] = {}

    def execute(scheduled: Any, *arguments: Any) -> Any:
        nonlocal drafts
        drafts = scheduled.scheduled_spec_decode_tokens
        connector.begin_step(scheduled.aux_output_connector_metadata)
        return execute_model(scheduled, *arguments)

    def sample(grammar: Any) -> Any:
        output = sample_tokens(grammar)
        starts_R = runner.query_start_loc.np[: len(output.req_ids) + 1].copy()
        ends_R = runner.optimistic_seq_lens_cpu.numpy()[: len(output.req_ids)]
        batch = SimpleNamespace(
            req_ids=output.req_ids, query_start_loc_np=starts_R, num_computed_tokens_np=ends_R - np.diff(starts_R)
        )
        if pending := connector.prepare_output(batch):
            sampled_R = np.array([len(ids) for ids in output.sampled_token_ids])
            drafted_R = np.array([len(drafts.get(name, ())) for name in output.req_ids])
            pending.enqueue_cpu_copy(sampled_R, np.where(sampled_R > 0, drafted_R + 1 - sampled_R, 0))
            output.aux_output_connector_output = pending.process_output()
        return output

    runner.execute_model, runner.sample_tokens = execute, sample
