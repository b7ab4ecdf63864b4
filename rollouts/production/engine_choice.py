"""The engine that a run file asks for."""

from __future__ import annotations

from pathlib import Path

from rollouts.chat.chat_tokens import ChatTokens
from rollouts.engines.engine import Engine
from settings.engine import EngineSettings


def make_engine(settings: EngineSettings, model: Path, *, seed: int, version: int, lora_rank: int = 0) -> Engine:
    """An engine, not started, that is to serve policy `version`; with `lora_rank`, adapters of `model`."""
    match settings.kind:
        case "vllm":
            from rollouts.engines.vllm_engine import VllmEngine

            return VllmEngine(
                max_model_len=settings.max_model_len,
                seed=seed + version,  # an engine that starts again must not draw the same numbers again
                update_mode=settings.update_mode,
                clear_cache_on_reload=settings.clear_cache_on_reload,
                arguments=settings.vllm,
                lora_rank=lora_rank,
                base_folder=model if lora_rank else None,
                ends_process=True,
            )
        case "scripted":
            from rollouts.engines.scripted_engine import ScriptedEngine, random_reply

            tokens = ChatTokens.load(model)
            alphabet = tokens.alphabet()
            reply = random_reply(seed=seed, alphabet=alphabet, end_id=tokens.end_id, longest=3)
            return ScriptedEngine(reply, num_choices=len(alphabet))
