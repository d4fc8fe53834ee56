"""Fuzzes guides: no guide that a client may send ends the process that compiles it, takes long, or takes much memory.

    python -m tests.server.fuzz.guides --tokenizer .cache/engines/smollm2-nested --seconds 600 --seed 1

Random schemas, expressions and grammars, some of them mutated, are compiled in a child process, which then draws some tokens.
Exit status 0 if no fault was found; else the guide that led to it is in --folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from tests.support.draws import allowed_tokens

from kvseek.core.config import read_config
from kvseek.core.errors import RequestError, SamplingError
from kvseek.core.guide import MAX_BYTES, MAX_DEPTH, MAX_REFERENCES, MAX_TEXT_CHARACTERS, Guide, GuideType
from kvseek.engine.schedule.guides import Guides
from kvseek.engine.tokenizer import Tokenizer

TOKENS = 16  # drawn with each guide
COMPILE_SECONDS, TOKEN_SECONDS = 10.0, 2.0  # of processor time; far above LIMITS of guides.py, for slow machines
HUNG_SECONDS = 90.0  # until the child counts as hung
GROWTH_BYTES = 1 << 30  # that the child may take for one guide
NUMBERS = (0, 1, 2, 7, 20, 1000, 65_536, 10**9, 2**31, 2**63, 10**30, -1, 0.5, 1e-9, 1e300)
TEXTS = ("", "a", "é", "\u0000", "😀", '"', "\\", "a" * 300, "[a-z]+", r"\d{3,}", "date-time", "uuid", "$", "#/x")


@dataclass(frozen=True)
class Cost:
    """What a guide cost the child: processor seconds, and bytes that the child has grown by."""

    outcome: str
    compile_seconds: float = 0.0
    token_seconds: float = 0.0
    grown_bytes: int = 0


def fault_of(cost: Cost) -> str:
    """Name what is too much; empty if nothing is."""
    for name, found, limit in (
        ("seconds to compile", cost.compile_seconds, COMPILE_SECONDS),
        ("seconds for a token", cost.token_seconds, TOKEN_SECONDS),
        ("bytes", cost.grown_bytes, GROWTH_BYTES),
    ):
        if found > limit:
            return f"{found:g} {name}: must be <= {limit:g}"
    return ""


def pattern(random: Random, depth: int) -> str:
    """A random regular expression."""
    if depth <= 0:
        return random.choice(("a", "b", ".", r"\d", r"\w", r"\pL", "[^x]", "[a-zé]", "(?i)k", "^", "$", r"\x{1F600}"))
    part = pattern(random, depth - random.randint(1, 3))
    kind = random.randrange(6)
    if kind == 0:
        return part + pattern(random, depth - 1)
    if kind == 1:
        return f"({part}|{pattern(random, depth - 1)})"
    if kind == 2:
        low = random.choice((0, 1, 3, 50, 1000))
        return f"({part}){{{low},{low + random.choice((0, 1, 100, 10_000))}}}"
    return f"({part}){random.choice('?*+')}"


def grammar(random: Random) -> str:
    """A random grammar in GBNF."""
    rules = random.randint(1, 30)

    def item(depth: int = 5) -> str:
        kind = random.randrange(5 if depth else 2)
        if kind == 0:
            return f"r{random.randrange(rules)}"
        if kind == 1:
            return random.choice(("[a-z]", "[^\\n]", '"ab"', '"é"', '""', "[0-9]"))
        if kind == 2:
            return f"({item(depth - 1)} | {item(depth - 1)})"
        if kind == 3:
            return f"{item(depth - 1)}{random.choice(('?', '*', '+', '{2,5}', '{0,1000}'))}"
        return f"{item(depth - 1)} {item(depth - 1)}"

    lines = [f"r{number} ::= {item()}" + (f" | {item()}" if random.random() < 0.5 else "") for number in range(rules)]
    return "\n".join(["root ::= r0", *lines])


def schema(random: Random, depth: int) -> Any:
    """A random JSON schema, mostly one that means something."""
    if depth <= 0 or random.random() < 0.1:
        leaves: tuple[Any, ...] = (
            {"type": random.choice(("string", "integer", "number", "boolean", "null", "object", "array"))},
            {"enum": random.sample(TEXTS, 3)},
            {"const": random.choice(NUMBERS)},
            {"$ref": random.choice(("#", "#/$defs/d0", "#/$defs/d1", "#/properties/a"))},
            True,
            False,
        )
        return random.choice(leaves)
    below = lambda: schema(random, depth - random.randint(1, 3))  # noqa: E731
    several = lambda: [below() for _ in range(random.choice((1, 2, 3, 8)))]  # noqa: E731
    keywords: dict[str, Callable[[], Any]] = {
        "properties": lambda: {random.choice("abcdefgh") + str(i): below() for i in range(random.choice((1, 3, 20)))},
        "patternProperties": lambda: {pattern(random, 3): below()},
        "additionalProperties": below,
        "items": below,
        "prefixItems": several,
        "anyOf": several,
        "oneOf": several,
        "allOf": several,
        "pattern": lambda: pattern(random, random.randint(1, 8)),
        "format": lambda: random.choice(("date", "date-time", "uuid", "email", "uri", "ipv6", "nothing")),
        "required": lambda: random.sample(TEXTS, 2),
        **{
            name: lambda: random.choice(NUMBERS)
            for name in ("minimum", "maximum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength")
        },
        **{name: lambda: random.choice(NUMBERS) for name in ("minItems", "maxItems", "maxProperties")},
    }
    kind = random.choice(("object", "array", "string", "integer", "number"))
    chosen = random.sample(sorted(keywords), random.randint(1, 4))
    return {"type": kind, **{name: keywords[name]() for name in chosen}}


def document(random: Random) -> str:
    """A random schema with definitions, as text."""
    depth = random.choice((1, 3, 6, 12))
    made = schema(random, depth)
    if isinstance(made, dict):
        made["$defs"] = {f"d{number}": schema(random, depth // 2) for number in range(2)}
    return json.dumps(made)


def extreme(random: Random) -> str:
    """A schema at one of the limits of core/guide.py."""
    inner: Any = random.choice(({"type": "null"}, {"type": "string"}, {"$ref": "#"}))
    kind = random.randrange(4)
    if kind == 0:
        for _ in range(MAX_DEPTH // 2 - 2):
            inner = random.choice(({"items": inner}, {"properties": {"a": inner}}, {"anyOf": [inner]}))
        return json.dumps(inner)
    if kind == 1:
        count = MAX_REFERENCES - 1
        form = random.choice(("anyOf", "allOf", "oneOf", "prefixItems"))
        chain: dict[str, Any] = {f"d{i}": {form: [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(count)}
        return json.dumps({"$ref": "#/$defs/d0", "$defs": chain | {f"d{count}": inner}})
    if kind == 2:
        return json.dumps({"type": "string", "pattern": (pattern(random, 6) * 900)[:MAX_TEXT_CHARACTERS]})
    width = random.choice((100, 400, 1200))
    return json.dumps({"type": "object", "properties": {f"p{i}": inner for i in range(width)}})


def mutated(random: Random, text: str) -> str:
    """Change some characters, or repeat a part of the text."""
    if random.random() < 0.6 or not text:
        return text
    at, end = sorted((random.randrange(len(text)), random.randrange(len(text))))
    if random.random() < 0.3:
        return text[:at] + text[at:end] * random.choice((0, 2, 20)) + text[end:]
    return text[:at] + random.choice((*TEXTS, "{", "}", "(", ")", "|", "*", "{1,", ",")) + text[end:]


def make(random: Random) -> Guide | None:
    """A random guide; None if it is none, so that no engine would get it."""
    kind = random.choice((GuideType.JSON_SCHEMA, GuideType.JSON_SCHEMA, GuideType.REGEX, GuideType.EBNF_GRAMMAR))
    if kind is GuideType.JSON_SCHEMA:
        text = random.choice((document, document, document, extreme))(random)
    elif kind is GuideType.REGEX:
        text = (pattern(random, random.randint(1, 20)) * random.choice((1, 1, 30)))[: MAX_BYTES[kind]]
    else:
        text = grammar(random)
    try:
        return Guide(kind, mutated(random, text))
    except RequestError:
        return None


def cost(guides: Guides, guide: Guide, seed: int) -> Cost:
    """Compile a guide and draw tokens."""
    random, before = Random(seed), resident_bytes()
    began, compiled, longest, outcome = time.process_time(), 0.0, 0.0, "followed"
    try:
        matcher = guides.matcher(guide)
        compiled = time.process_time() - began
        for _ in range(TOKENS):
            began = time.process_time()
            allowed = allowed_tokens(matcher).nonzero()[:, 0]
            if not len(allowed):
                break
            matcher.accept(int(allowed[random.randrange(len(allowed))]))
            longest = max(longest, time.process_time() - began)
    except RequestError:
        compiled, outcome = time.process_time() - began, "refused"
    except SamplingError:
        longest, outcome = max(longest, time.process_time() - began), "ended"
    return Cost(outcome, compiled, longest, resident_bytes() - before)


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def serve(pipe: Connection, directory: Path) -> None:
    """Measure the cost of every guide that comes; runs in the child."""
    guides = Guides(Tokenizer(directory), read_config(directory))
    guides.load_vocabulary()
    pipe.send(None)
    while True:
        guide, seed = pipe.recv()
        pipe.send(cost(guides, guide, seed))


class Child:
    """The child process; it is started again after each fault."""

    def __init__(self, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, directory), daemon=True)
        self._process.start()
        other.close()
        self._pipe.recv()

    def cost(self, guide: Guide, seed: int) -> Cost | str:
        """Measure a guide; returns what became of the child if it gives no answer."""
        self._pipe.send((guide, seed))
        try:
            if self._pipe.poll(HUNG_SECONDS):
                answer: Cost = self._pipe.recv()
                return answer
        except EOFError:
            self._process.join()
            return f"the process ended with status {self._process.exitcode}"
        self.end()
        return f"the process has not answered for {HUNG_SECONDS:g} s"

    def end(self) -> None:
        """End the child."""
        self._process.kill()
        self._process.join()


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz until the time is over; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="an engine directory, whose vocabulary is used")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(), help="of guides that led to faults")
    arguments = parser.parse_args(argv)
    random, child, faults, kinds = Random(arguments.seed), Child(arguments.tokenizer), 0, Counter[str]()
    worst = Cost("")
    deadline = time.monotonic() + arguments.seconds
    while time.monotonic() < deadline:
        guide = make(random)
        if guide is None:
            kinds["not sent"] += 1
            continue
        answer = child.cost(guide, random.randrange(1 << 30))
        fault = answer if isinstance(answer, str) else fault_of(answer)
        if isinstance(answer, str):
            kinds["fault"] += 1
            child = Child(arguments.tokenizer)
        else:
            kinds[answer.outcome] += 1
            most = {name: max(getattr(worst, name), getattr(answer, name)) for name in vars(worst) if name != "outcome"}
            worst = replace(worst, **most)
        if fault:
            faults += 1
            path = arguments.folder / f"guide-{arguments.seed}-{faults}.{guide.type}"
            path.write_text(guide.guide, encoding="utf-8", errors="surrogatepass")
            print(f"{path}: {fault}", file=sys.stderr)
    child.end()
    print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    print(
        f"most: {worst.compile_seconds:.2f} s to compile, {worst.token_seconds * 1e3:.0f} ms for a token, "
        f"{worst.grown_bytes >> 20} MB"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
