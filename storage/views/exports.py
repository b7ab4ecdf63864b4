"""Trajectories as data sets for other trainers: supervised fine-tuning and preference pairs, as Parquet.

In: an open run and a filter in SQL. Out: one file that `datasets.load_dataset("parquet", data_files=…)` reads.

    sft  messages                      one row per attempt; also its reward and the named parts of it
    dpo  prompt | chosen | rejected    one row per group whose best and worst attempt differ enough

Both are conversational: a message is `{role, content}`. Held-out attempts stay out unless they are asked for.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from string import Template

import pyarrow as pa
import pyarrow.parquet as pq

from settings.errors import InvalidInput
from storage.views.queries import Queries

_SFT = """
SELECT list_transform(messages, lambda m: {'role': m.role, 'content': m.content}) AS messages,
    prompt_id, reward, map_entries(reward_parts) AS reward_parts, id AS trajectory_id
FROM trajectories
WHERE sequence_idx = 0 AND len(messages) > 0 AND $condition
ORDER BY shard_number, position, attempt
"""

_DPO = """
WITH pairs AS (
    SELECT shard_id, group_id,
        arg_min(id, (-reward, attempt)) AS chosen_id, max(reward) AS chosen_reward,
        arg_min(id, (reward, attempt)) AS rejected_id, min(reward) AS rejected_reward
    FROM trajectories
    WHERE sequence_idx = 0 AND reward IS NOT NULL AND $condition
    GROUP BY ALL
    HAVING max(reward) > min(reward) AND max(reward) - min(reward) >= $margin
),
spoken AS (
    SELECT id, shard_id, group_id, prompt_id, shard_number, position,
        list_position(list_transform(messages, lambda m: m.is_completion), true) AS first,
        list_transform(messages, lambda m: {'role': m.role, 'content': m.content}) AS messages
    FROM trajectories
    WHERE sequence_idx = 0 AND $condition
)
SELECT
    any_value(messages[:first - 1]) FILTER (id = chosen_id) AS prompt,
    any_value(messages[first:]) FILTER (id = chosen_id) AS chosen,
    any_value(messages[first:]) FILTER (id = rejected_id) AS rejected,
    prompt_id, chosen_reward, rejected_reward, chosen_id, rejected_id
FROM spoken JOIN pairs USING (shard_id, group_id)
WHERE id IN (chosen_id, rejected_id) AND first IS NOT NULL
GROUP BY shard_id, group_id, prompt_id, shard_number, position, chosen_reward, rejected_reward, chosen_id, rejected_id
HAVING count(DISTINCT messages[:first - 1]) = 1 AND count(DISTINCT messages) = 2
ORDER BY shard_number, position
"""


def export_rows(
    queries: Queries,
    file: Path,
    kind: str,
    *,
    where: str = "",
    margin: float = 0.0,
    include_eval: bool = False,
    force: bool = False,
) -> int:
    """Write the attempts that satisfy `where`, a condition on the view `trajectories`; returns the number of rows.

    Of kind `sft` all of them; of kind `dpo` the best and the worst of every group, if their rewards differ, and by at
    least `margin`. The first attempt counts if several have the same reward. Groups whose two attempts began with
    different messages, or have equal replies, are left out.

    Raises `InvalidInput` for wrong SQL, if there is no row, and for a file that exists, unless `force`.
    """
    if file.exists() and not force:
        raise InvalidInput(f"{file} is there already; add --force to replace it, or choose another name")
    if not file.parent.is_dir():
        raise InvalidInput(f"there is no folder {file.parent}; make it first")
    # On a line of its own, so that a comment in `where` ends there.
    condition = f"({where or 'true'}\n)" + ("" if include_eval else " AND is_eval = false")
    sql = Template(_SFT if kind == "sft" else _DPO).substitute(condition=condition, margin=float(margin))
    partial = file.parent / f".{file.name}.{uuid.uuid4().hex}.tmp"

    def write(reader: pa.RecordBatchReader) -> int:
        num_rows = 0
        with pq.ParquetWriter(partial, reader.schema, compression="zstd") as writer:
            for batch in reader:
                writer.write_batch(batch)
                num_rows += len(batch)
        return num_rows

    try:
        num_rows = queries.stream(sql, write)
        if not num_rows:
            raise InvalidInput("nothing to export: no trajectory satisfies the conditions, so no file was written")
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    return num_rows
