"""Needle dialogues in one request each: does an index that goes on find what one that is built anew each round finds?

    python evaluation/one_request.py --engine_dir DIR --lengths 16384 --n 6 --output FILE

evaluation/needle.py asks every round of `multi_turn` in a request of its own, whose index is built for it. Here a dialogue is
one request: the first question stands in its prompt, and the tokens of the later ones are fed to decode steps, as if they had
been drawn. So the index takes in what decode steps tell it (for `ctkvr` the queries, as new centroids) and is never built
again. Contexts, questions and scores are those of needle.py, and so are the flags and the result files.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from kvseek.core.errors import KvseekError
from kvseek.core.request import FinishReason, Request, SamplingParams
from kvseek.engine.draws.sampling import Drawn, Sampler
from kvseek.engine.engine import Engine
from kvseek.evaluation import needle
from kvseek.evaluation.needle import EXTRA_TOKENS
from kvseek.evaluation.needle_results import Results, print_table
from kvseek.evaluation.needle_tasks import vocabulary
from kvseek.evaluation.needle_tasks.facts import Score, score
from kvseek.evaluation.needle_tasks.tasks import Dialogue, make_dialogues
from kvseek.measurement.machine import describe
from kvseek.measurement.output import run_command, write_result

TASK = "multi_turn"


class DialogueSampler(Sampler):
    """Gives the tokens of answers as they are drawn, and behind each answer the tokens of the next question.

    Attributes
    ----------
    answers : list of list of int
        Token ids of each round that was begun, the full stop included.
    done : bool
        Whether the last round has been answered.
    """

    def __init__(self, request: Request, vocab_size: int, dialogue: Dialogue) -> None:
        super().__init__(request, vocab_size)
        self._rounds, self._question = dialogue.rounds, deque[int]()
        self.answers: list[list[int]] = [[]]
        self.done = False

    def take(self, drawn: Drawn | int) -> int:
        """See Sampler.take."""
        token = super().take(drawn)
        if self._question:
            return self._question.popleft()
        answer, (_, _, gold) = self.answers[-1], self._rounds[len(self.answers) - 1]
        answer.append(token)
        if token == vocabulary.FULL_STOP or len(answer) == len(gold) + EXTRA_TOKENS:
            self.done = len(self.answers) == len(self._rounds)
            if not self.done:
                self._question.extend(self._rounds[len(self.answers)][1])
                self.answers.append([])
        return token


def converse(engine: Engine, dialogue: Dialogue) -> list[tuple[Score, float]]:
    """Ask all rounds in one request; the score and the attended share by round, as needle.converse returns them."""
    prompt = (*dialogue.context, *dialogue.rounds[0][1])
    most = sum(len(question) + len(gold) + EXTRA_TOKENS for _, question, gold in dialogue.rounds)
    sequence = engine.prepare(Request(prompt, most, SamplingParams(temperature=0)))
    sequence.sampler = sampler = DialogueSampler(sequence.request, engine.config.model.vocab_size, dialogue)
    engine.enqueue(sequence)
    shares: list[list[float]] = [[] for _ in dialogue.rounds]
    while not sampler.done:
        round_now = len(sampler.answers) - 1
        for output in engine.step():
            if output.finish_reason is FinishReason.ERROR:
                raise KvseekError(f"the request failed: {output.error}")
            if output.cached_tokens:
                shares[round_now].append(output.attended_tokens / output.cached_tokens)
    engine.cancel(sequence.request_id)
    asked = zip(dialogue.rounds, sampler.answers, shares, strict=True)
    return [(score(kind, gold, answer), sum(part) / len(part)) for (kind, _, gold), answer, part in asked]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask every engine all dialogues that the result file has no answers to; the document, as Results.document."""
    _, lengths = needle.chosen_questions(arguments, n=24, rounds=8)
    results, end = Results({"rounds": arguments.rounds, "one_request": 1}), time.monotonic() + arguments.seconds
    written = [arguments.output] if arguments.output and arguments.output.exists() else []
    for path in [*arguments.results, *written]:
        results.read(path)
    engines = [Engine.load(path, arguments.threads) for path in arguments.engine_dir]
    names = needle.engine_names(arguments.engine_dir, [engine.config for engine in engines])
    for name, engine in zip(names, engines, strict=True):
        needle.check_vocabulary(engine.config, name)
        needle.check_lengths(engine.config, name, max(lengths), arguments.rounds)
        results.add_engine(name, dataclasses.asdict(engine.config), "--engine_dir")
    if engines:
        results.add_machine(describe())
    for length in lengths:
        for name, engine in zip(names, engines, strict=True):
            cell = results.cell(length, TASK, name)
            while cell.contexts < arguments.n and (start := time.monotonic()) < end:
                (dialogue,) = make_dialogues(TASK, length, 1, rounds=arguments.rounds, first=cell.contexts)
                cell.add([converse(engine, dialogue)], time.monotonic() - start)
                if arguments.output:
                    write_result(arguments.output, results.document())
                done = f"{cell.contexts} dialogues, exact {100 * cell.exact:.1f} %, {cell.seconds:.0f} s"
                print(f"{length} {name}: {done}", file=sys.stderr, flush=True)
    return results.document()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings: the flags of needle.py, all of whose tasks are this one."""
    arguments = needle.parse(argv)
    arguments.tasks = TASK
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return run_command(argv, parse, run, print_table)


if __name__ == "__main__":
    sys.exit(main())
