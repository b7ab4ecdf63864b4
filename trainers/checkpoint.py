"""Weights out, optimizer state out and in: safetensors and JSON, no pickle.

In: a sharded model and its optimizer. Out: a sealed policy folder that any HF tool loads; a state folder that resumes
the optimizer bit for bit. Tensors are stored whole, so another number of ranks can read them.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from settings.errors import InvalidInput, counted
from storage.objects.digests import DIGEST_FILE, WEIGHTS_FILE, seal_folder, verify_folder
from storage.policies.adapters import ADAPTER_WEIGHTS, has_adapter
from trainers.model.distributed import copy_into, full, num_ranks, on_first_rank, rank
from trainers.model.lora import has_adapters, read_adapter, saved_name, write_adapter
from trainers.model.model import PolicyModel
from trainers.model.stored import stored_dtypes, write_weights
from trainers.model.weight_index import INDEX_FILE
from trainers.trainer import Trainer

logger = logging.getLogger("millrace.trainer")

_STATE, _CRITIC = "state.safetensors", "critic."
_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf", DIGEST_FILE)


def save_policy(
    model: PolicyModel, base_folder: Path, folder: Path, *, dtypes: Mapping[str, torch.dtype] | None = None
) -> str:
    """Write the weights beside the base model's configuration and tokenizer; returns the weights digest.

    The file has every tensor that the base model's files have, in its type there, or those of `dtypes`, which a run
    that began before has. Of a model with adapters only these are written, in peft's format. Equal weights give equal
    digests, on any number of ranks. Every rank must call it, with the same folder: those that see what rank 0 has made
    write a share each.
    """
    if has_adapters(model):
        write_adapter(model.causal_lm, None if rank() else folder, base=base_folder.name)
        return on_first_rank(lambda: seal_folder(folder))

    def make() -> None:
        folder.mkdir(parents=True)
        for file in base_folder.iterdir():
            if file.is_file() and not file.name.endswith(_NOT_COPIED):
                shutil.copy(file, folder / file.name)

    on_first_rank(make)
    trained = {name: parameter for name, parameter in model.causal_lm.named_parameters() if parameter.requires_grad}
    dtypes = stored_dtypes(base_folder) if dtypes is None else dtypes
    write_weights(model.causal_lm, trained, base_folder, folder / WEIGHTS_FILE, dtypes=dtypes)
    return on_first_rank(lambda: seal_folder(folder))


def save_state(trainer: Trainer, folder: Path | None, *, step: int) -> None:
    """Write float32 weights, both moments of every parameter, the critic's too, and torch's random state.

    Frozen weights, those under adapters, are the base policy's and are not written again. Every rank must call it, for
    shards are gathered; those that do not write pass no folder.
    """
    tensors: dict[str, torch.Tensor] = {"random_state": torch.get_rng_state()}
    for name, parameter, optimizer in _trained(trainer, with_critic=True):
        for key, value in [("weight", parameter), *optimizer.state.get(parameter, {}).items()]:
            whole = full(value)
            if folder is not None:
                tensors[f"{key}/{name}"] = whole.contiguous()
    if trainer.ema is not None:
        tensors |= trainer.ema.state_tensors()
    if folder is None:
        return
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / _STATE))
    (folder / "state.json").write_text(json.dumps({"step": step, "world_size": num_ranks()}))
    seal_folder(folder)


def load_state(trainer: Trainer, folder: Path) -> int:
    """Restore what `save_state` wrote, at this number of ranks or another; returns its step. A critic that the state
    does not know stays new.

    Raises `storage.objects.digests.DigestMismatch` for a half-written or altered folder, `ValueError` for a state of
    other trained weights.
    """
    verify_folder(folder)
    tensors = load_file(str(folder / _STATE))
    saved = {name.removeprefix("weight/") for name in tensors if name.startswith("weight/")}
    with_critic = trainer.critic is not None and any(name.startswith(_CRITIC) for name in saved)
    if trainer.critic is not None and not with_critic:
        logger.warning("%s holds no critic: it starts anew", folder)
    trained = _trained(trainer, with_critic=with_critic)
    if {name for name, *_ in trained} != {name for name in saved if with_critic or not name.startswith(_CRITIC)}:
        raise InvalidInput(
            f"{folder} holds the state of other trained weights; train.lora must be as when it was saved"
        )
    torch.set_rng_state(tensors["random_state"])
    for name, parameter, optimizer in trained:
        optimizer.state.pop(parameter, None)
        copy_into(parameter, tensors[f"weight/{name}"])
        if f"exp_avg/{name}" in tensors:
            # On the parameter's device: a fused optimizer reads it there.
            state = {"step": tensors[f"step/{name}"].to(parameter.device)}
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(parameter)
                copy_into(state[key], tensors[f"{key}/{name}"])
            optimizer.state[parameter] = state
    if trainer.ema is not None:
        trainer.ema.load(tensors)
    about = json.loads((folder / "state.json").read_text())
    step, saved_by = int(about["step"]), about.get("world_size", 1)
    if saved_by != num_ranks():
        logger.warning(
            "the state of step %d was saved by %s, and the number is now %d: they add in another order, so weights "
            "agree to about 1e-6 with those of the old number, not bit for bit",
            step,
            counted(saved_by, "rank"),
            num_ranks(),
        )
    return step


def save_average(state_folder: Path, policy_folder: Path, folder: Path) -> str:
    """Write the moving average of the weights that a saved state holds as a policy folder; returns its digest.

    Types and other files are those of `policy_folder`. Raises `ValueError` for a state without an average, and
    `storage.objects.digests.DigestMismatch` for an altered one.
    """
    verify_folder(state_folder)
    tensors = load_file(str(state_folder / _STATE))
    average = {name.removeprefix("ema/"): tensor for name, tensor in tensors.items() if name.startswith("ema/")}
    if not average:
        raise InvalidInput("no moving average was kept; train with train.ema, such as 0.99")
    shutil.copytree(policy_folder, folder, ignore=shutil.ignore_patterns(DIGEST_FILE, "*.safetensors", INDEX_FILE))
    if has_adapter(policy_folder):
        weights = {saved_name(name): tensor.contiguous() for name, tensor in average.items()}
        save_file(weights, str(folder / ADAPTER_WEIGHTS), metadata={"format": "pt"})
    else:
        causal_lm = AutoModelForCausalLM.from_pretrained(str(policy_folder), dtype=torch.float32)
        weights = {saved_name(name): tensor for name, tensor in average.items()}
        dtypes = stored_dtypes(policy_folder)
        write_weights(causal_lm, weights, policy_folder, folder / WEIGHTS_FILE, dtypes=dtypes)
    return seal_folder(folder)


def load_weights(model: PolicyModel, folder: Path) -> None:
    """Put a policy folder's weights into the model, leaving the optimizer alone. Raises
    `storage.objects.digests.DigestMismatch` for a half-written or altered folder."""
    verify_folder(folder)
    if has_adapters(model):
        read_adapter(model.causal_lm, folder)
        return
    with torch.random.fork_rng():  # what a policy lacks, as a buffer, is drawn, and must not move the run's stream
        saved = dict(AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).named_parameters())
    for name, parameter in model.causal_lm.named_parameters():
        copy_into(parameter, saved[name].to(parameter.dtype))


def _trained(trainer: Trainer, *, with_critic: bool) -> list[tuple[str, nn.Parameter, torch.optim.AdamW]]:
    """Every weight an optimizer moves, by the name it is saved under."""
    named = trainer.model.named_parameters()
    trained = [(name, weight, trainer.optimizer) for name, weight in named if weight.requires_grad]
    if with_critic and (critic := trainer.critic) is not None:
        trained += [(_CRITIC + name, weight, critic.optimizer) for name, weight in critic.model.named_parameters()]
    return trained
