"""Mini-batches as packs on the device: whole groups spread over ranks, their rows end to end in forward passes.

    groups of a mini-batch ─▶ one share per rank ─▶ packs of at most `budget` tokens ─▶ Pack, tensors of shape [T]

In: samples, and arrays with one value per token of them. Out: `Pack`s, equally many on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from trainers.data.operations import work_of
from trainers.data.packing import distribute_groups, new_tokens, pack_groups, position_ids, shared_tokens
from trainers.data.samples import Samples
from trainers.model.layout import Layout
from trainers.model.teams import Team


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Several sequences end to end, on the device.

    Every tensor but `positions` has shape [T]. What belongs to a token stands one place before it, at the position that
    predicts it. A row's last token is left out; a row of one token keeps it, with mask 0.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor  # the next token of the same row; 0 where there is none
    mask: torch.Tensor  # 1 where the target was sampled by the policy and is trained
    position_ids: torch.Tensor
    sequences: torch.Tensor  # which sequence of the pack a token belongs to, int64
    layout: Layout  # where the sequences stand, and which of their tokens are the same
    positions: torch.Tensor  # where this rank predicts a sampled token: prompts and tools need no logits. Shape [N].
    num_predicted: int  # how many such positions all ranks of the team have
    values: Mapping[str, torch.Tensor]  # whatever else was asked for per token, by name
    tokens: np.ndarray  # where each token stands in the samples' flat arrays
    is_last: np.ndarray  # true on a token that nothing follows: that of a row of one
    is_idle: bool  # true for a pack that only keeps this rank in step with the others: nothing in it is trained

    def to_tokens(self, values_T: torch.Tensor, out_T: np.ndarray) -> None:
        """Write values at predicting positions to where their tokens stand in the samples."""
        inner = ~self.is_last
        out_T[self.tokens[inner] + 1] = values_T.detach().double().cpu().numpy()[inner]

    def gap_values(self, weights: str = "gap_weights") -> list[torch.Tensor]:
        """What `trainers.health.GapMeter.add` wants beside the trainer's log-probabilities."""
        return [self.values[name] for name in ("sampled_logprobs", weights, "shards")]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How rows are spread over ranks, or over teams of ranks, which share packs."""

    rank: int  # this one's number, or that of its team
    world_size: int
    attention_length: float = math.inf  # ranks get as much arithmetic (`work_of`); infinite: as many tokens
    team: Team | None = None


def packs_of(
    samples: Samples,
    rows: np.ndarray,
    *,
    mask_T: np.ndarray,
    values: Mapping[str, np.ndarray],
    budget: int,
    spread: Spread,
    device: torch.device,
) -> Iterator[Pack]:
    """This rank's packs of `rows`, which are whole groups; all ranks get equally many, so that collectives match.
    `mask_T` and each of `values` hold one number per token of the samples, at the token itself."""
    lengths = _num_predicting(samples, rows)
    work = work_of(lengths, attention_length=spread.attention_length)
    shares = _rows_by_rank(samples.groups_B[rows], work, world_size=spread.world_size)
    new = _num_new(samples, rows, lengths) if samples.arithmetic >= 3 else lengths
    packed = [
        pack_groups(lengths[share], samples.groups_B[rows[share]], budget=budget, new=new[share]) for share in shares
    ]
    if math.isfinite(spread.attention_length):
        for share, packs in zip(shares, packed, strict=True):
            packs.sort(key=lambda pack: -work[share[pack]].sum())
    mine = [rows[shares[spread.rank][pack]] for pack in packed[spread.rank]]
    for pack in mine:
        yield build_pack(samples, pack, mask_T=mask_T, values=values, device=device, team=spread.team)
    shortest = rows[[int(np.argmin(lengths))]]
    for _ in range(max(map(len, packed)) - len(mine)):
        yield build_pack(samples, shortest, mask_T=None, values=values, device=device, team=spread.team)


def build_pack(
    samples: Samples,
    rows: np.ndarray,
    *,
    mask_T: np.ndarray | None,
    values: Mapping[str, np.ndarray],
    device: torch.device,
    team: Team | None = None,
) -> Pack:
    """The pack of these rows; an idle one without a mask. A team's ranks get the same, but for their positions."""
    lengths = _num_predicting(samples, rows)
    before = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    tokens = np.repeat(samples.offsets[rows] - before, lengths) + np.arange(lengths.sum())
    is_last = tokens == np.repeat(samples.offsets[rows + 1] - 1, lengths)
    next_token = np.where(is_last, tokens, tokens + 1)

    def shifted(values_T: np.ndarray) -> torch.Tensor:
        moved = values_T[next_token]
        moved[is_last] = 0
        return torch.from_numpy(moved).to(device)

    layout = Layout(
        lengths,
        device=device,
        computed_T=shared_tokens(_identities(samples, tokens), lengths),
        arithmetic=samples.arithmetic,
        team=team,
    )
    if samples.routes_T is not None:
        layout.replay(torch.from_numpy(_routes(samples, tokens)).to(device).long())
    predicts_T = samples.mask_T[next_token] & ~is_last
    positions = np.flatnonzero(predicts_T & layout.is_own_T.numpy())
    if not len(positions) and team is None:
        positions = np.zeros(1, np.int64)
    return Pack(
        input_ids=torch.from_numpy(samples.input_ids_T[tokens]).to(device).long(),
        targets=shifted(samples.input_ids_T).long(),
        mask=shifted((np.zeros(len(samples.mask_T)) if mask_T is None else mask_T).astype(np.float32)),
        position_ids=position_ids(lengths).to(device),
        sequences=torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)).to(device),
        layout=layout,
        positions=torch.from_numpy(positions).to(device),
        num_predicted=int(np.count_nonzero(predicts_T)),
        values={name: shifted(values_T) for name, values_T in values.items()},
        tokens=tokens,
        is_last=is_last,
        is_idle=mask_T is None,
    )


def _num_predicting(samples: Samples, rows: np.ndarray) -> np.ndarray:
    """How many tokens of each row go through the model: all but the last."""
    return np.maximum(1, np.diff(samples.offsets)[rows] - 1)


def _routes(samples: Samples, tokens: np.ndarray) -> np.ndarray:
    """The experts to replay for these tokens, −1 where they are not known; int32, [T, L, C]."""
    assert samples.routes_T is not None and samples.routed_T is not None
    return np.where(samples.routed_T[tokens, None, None], samples.routes_T[tokens].astype(np.int32), -1)


def _identities(samples: Samples, tokens: np.ndarray) -> np.ndarray:
    """What makes tokens after equal ones the same: their ids, [T], and with routes their experts too, [T, V]."""
    ids_T = samples.input_ids_T[tokens]
    if samples.routes_T is None:
        return ids_T
    return np.concatenate([ids_T[:, None], _routes(samples, tokens).reshape(len(tokens), -1)], 1)


def _num_new(samples: Samples, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """How many of them the row before in its group does not begin with."""
    order = np.argsort(samples.groups_B[rows], kind="stable")
    tokens = np.concatenate([np.arange(samples.offsets[rows[r]], samples.offsets[rows[r]] + lengths[r]) for r in order])
    shared = shared_tokens(_identities(samples, tokens), lengths[order])
    new = np.empty_like(lengths)
    new[order] = new_tokens(shared, torch.from_numpy(lengths[order])).numpy()
    return new


def _rows_by_rank(groups_R: np.ndarray, work_R: np.ndarray, *, world_size: int) -> list[np.ndarray]:
    """Which of the rows each rank takes; a group's rows stay together."""
    if world_size == 1:
        return [np.arange(len(groups_R))]
    groups, group_R = np.unique(groups_R, return_inverse=True)
    work_G = np.bincount(group_R, weights=work_R, minlength=len(groups)).astype(np.int64)
    shares = distribute_groups(work_G, num_ranks=world_size)
    return [np.flatnonzero(np.isin(group_R, share)) for share in shares]
