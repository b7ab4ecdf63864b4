"""Grade-school maths, one turn: think, then give the final answer after ####.

In: `dataset`, JSONL or Parquet with `question` and `answer` (GSM8K's layout), split by file. Out: reward 1 for the
right final number, 0 for a wrong one and for no number.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace import Chat, InvalidInput, Message, Score, Task, Workflow, final_answer, gsm8k, read_dataset, score

INSTRUCTION = "Think step by step. Write the final answer as a number after ####."


class Gsm8k(Workflow):
    """Needs `dataset` in the run file: a folder with train and test files, or a hub id such as openai/gsm8k/main."""

    def tasks(self, split: str) -> Sequence[Task]:
        if self.dataset is None:
            raise InvalidInput("dataset must be set: a folder with train.jsonl and test.jsonl, or openai/gsm8k/main")
        rows = read_dataset(self.dataset, split, required=["question", "answer"])
        return [
            Task(id=f"{split}-{number}", prompt=row["question"], answer=row["answer"])
            for number, row in enumerate(rows)
        ]

    async def run(self, task: Task, chat: Chat) -> Score:
        reply = await chat.ask(f"{task.prompt}\n{INSTRUCTION}")
        return await score(gsm8k, reply, task.answer, vote=final_answer(reply))

    def reference_reply(self, task: Task, messages: Sequence[Message]) -> str:
        return task.answer
