"""Well-formed requests of the soak test, and what each gets when it is alone with a bare engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from kvseek.core.request import Request, SamplingConfig
from kvseek.engine.engine import Engine
from kvseek.engine.tokenizer import Tokenizer

WORDS = "the harbour master wrote the log while one ship of three lay at the quay in nineteen hundred".split()  # noqa: SIM905
LONGEST_ANSWER = 240


@dataclass(frozen=True)
class Case:
    """A request to one of the two models, and its answer.

    `tokens` are those that it gets alone; `texts[n]` is the text after n of them, all that a stream may have shown by then.
    """

    number: int
    model: str
    prompt: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingConfig
    tokens: tuple[int, ...] = ()
    texts: tuple[str, ...] = field(default=(), repr=False)

    def fields(self) -> dict[str, Any]:
        """Inputs of the model by name; seeds and the like only where the request samples."""
        params, is_text = self.sampling, self.model == "tensorrt_llm_bls"
        own: dict[str, Any] = {"end_id": -1, "exclude_input_in_output": True}
        if is_text:
            own |= {"text_input": self.prompt, "max_tokens": self.max_tokens, "return_num_output_tokens": True}
        else:
            own |= {"input_ids": list(self.prompt_ids), "request_output_len": self.max_tokens}
        if params.temperature:
            prefix = "" if is_text else "runtime_"
            own |= {"temperature": params.temperature, f"{prefix}top_k": params.top_k, f"{prefix}top_p": 1.0}
            own["seed"] = params.seed
        return own


def make_cases(engine_dir: Path, count: int, seed: int) -> list[Case]:
    """Make cases of both models with prompts from one token to near the longest."""
    engine, random = Engine.load(engine_dir, 1), Random(seed)
    drawn = [_draw(number, engine, random) for number in range(count)]
    answers = [engine.generate([Request(case.prompt_ids, case.max_tokens, case.sampling)])[0] for case in drawn]
    return [_answered(case, tokens, engine.tokenizer) for case, tokens in zip(drawn, answers, strict=True)]


def texts_of(tokenizer: Tokenizer, tokens: Sequence[int], prompt_ids: Sequence[int]) -> tuple[str, ...]:
    """The text of a stream after 0, 1, ... tokens; the last is the whole answer's."""
    stream, texts = tokenizer.stream(prompt_ids=prompt_ids), [""]
    for token in tokens:
        texts.append(texts[-1] + stream.push(token))
    texts[-1] += stream.finish()
    return tuple(texts)


def _answered(case: Case, tokens: Sequence[int], tokenizer: Tokenizer) -> Case:
    return replace(
        case, tokens=tuple(tokens), texts=texts_of(tokenizer, tokens, case.prompt_ids) if case.prompt else ()
    )


def _draw(number: int, engine: Engine, random: Random) -> Case:
    longest = engine.config.max_input_len - 4
    length = random.choice((1, 2, random.randint(3, 60), random.randint(60, 800), random.randint(800, longest)))
    length = min(length, longest)
    room = engine.config.max_seq_len - length
    max_tokens = min(
        room, random.choice((1, random.randint(2, 12), random.randint(12, 60), random.randint(60, LONGEST_ANSWER)))
    )
    sampling = SamplingConfig()
    if random.random() < 0.3:
        sampling = SamplingConfig(temperature=0.8, top_k=random.choice((0, 5, 50)), seed=random.randrange(2**63))
    if random.random() < 0.4:
        ids = tuple(random.randrange(3, engine.config.model.vocab_size) for _ in range(length))
        return Case(number, "tensorrt_llm", "", ids, max_tokens, sampling)
    prompt = _text(length, engine.tokenizer, random)
    return Case(number, "tensorrt_llm_bls", prompt, tuple(engine.tokenizer.encode(prompt)), max_tokens, sampling)


def _text(tokens: int, tokenizer: Tokenizer, random: Random) -> str:
    """A text of at most `tokens` tokens, at least one."""
    if tokens == 1:
        return random.choice("abcdefgh")
    words = " ".join(random.choice(WORDS) for _ in range(tokens))
    ids = tokenizer.encode(words)[:tokens]
    text = tokenizer.decode(ids)
    while len(tokenizer.encode(text)) > tokens:  # words cut in two may be spelt with other tokens
        text = text[:-1]
    return text or "a"
