"""lm-evaluation-harness with kvseek as its model `kvseek`: every kind of request is answered under the method's own selection.

    python -m kvseek.bench.accuracy.harness --model kvseek --tasks TASK --model_args model=MODEL,method=nested,max_seq_len=32768

The flags are lm_eval's, which finds no models in other packages: this program registers the model, and goes on as lm_eval. Of
--model_args `model` is a checkpoint or an engine directory; the others are those of kvseek.LLM, where METHOD.FIELD and
cache.FIELD are fields of the method and the cache, as flags of kvseek build are: nested.top_k=512. --batch_size is how many
requests are computed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
from transformers import AutoTokenizer

from kvseek import LLM, SamplingParams
from kvseek.core.errors import ConfigError
from kvseek.core.manifest import MANIFEST_FILE
from kvseek.engine.tokenizer import TOKENIZER_FOLDER

AT_ONCE = 64  # requests that are given to the engine together, between two steps of the progress bar
CACHE_FIELDS = "cache."


@register_model("kvseek")
class KvseekLM(TemplateLM):  # type: ignore[misc]
    """A model of kvseek.

    Parameters
    ----------
    model, **options
        As of kvseek.LLM; METHOD.FIELD and cache.FIELD are fields of `method_config` and `cache`.
    batch_size : int or str
        `max_batch_size` of an engine that is built; engine directories have their own.
    device : str, optional
        Of an engine that is built, as lm_eval's flag: its default "cuda:0" is the CPU where there is no GPU, as for lm_eval's
        own models.
    """

    backend = "causal"

    def __init__(
        self,
        model: str,
        batch_size: int | str = 4,
        device: str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        fields: dict[str, dict[str, Any]] = {"method_config": {}, "cache": {}}
        for name in [name for name in options if "." in name]:
            kind = "cache" if name.startswith(CACHE_FIELDS) else "method_config"
            fields[kind][name.partition(".")[2]] = options.pop(name)
        given: dict[str, Any] = {name: value for name, value in fields.items() if value}
        if not str(batch_size).isdecimal():
            raise ConfigError(f"--batch_size = {batch_size!r}: must be a number, as an engine has a fixed one; e.g. 4")
        if not (Path(model) / MANIFEST_FILE).exists():  # an engine directory has its own
            on_gpu = device is not None and device.startswith("cuda") and torch.cuda.is_available()
            options |= {"max_batch_size": int(batch_size), "device": "cuda" if on_gpu else "cpu"}
        self.llm = LLM(model, **given, **options)
        self.tokenizer = AutoTokenizer.from_pretrained(self.llm.engine_dir / TOKENIZER_FOLDER)  # for chat templates

    @property
    def eot_token_id(self) -> int:
        """The model's first end token."""
        return self.llm.config.model.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context: the token with which texts begin, or else the end token."""
        begin = self.llm.config.model.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """Under which lm_eval keeps prompts that it has made."""
        return str(self.llm.engine_dir.name)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text; with those with which the model expects a text to begin, unless the text has them."""
        begin = self.tokenizer.bos_token
        own = add_special_tokens is None and not (begin and string.startswith(begin))
        return self.llm.tokenizer.encode(string, add_special_tokens=own or bool(add_special_tokens))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, by the model's chat template."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Log probability of each continuation behind its context, and whether each of its tokens was the likeliest."""
        found: list[tuple[float, bool]] = []
        for start in tqdm(range(0, len(requests), AT_ONCE), disable=disable_tqdm, desc="loglikelihood"):
            some = requests[start : start + AT_ONCE]
            outputs = self.llm.score([one[1] for one in some], [one[2] for one in some], logprobs=1)
            for (pair, _, ids), output in zip(some, outputs, strict=True):
                steps = output.logprobs or ()
                greedy = all(step.top[0][0] == token for step, token in zip(steps, ids, strict=True))
                found.append((float(output.cumulative_logprob or 0.0), greedy))
                self.cache_hook.add_partial("loglikelihood", pair, found[-1])
        return found

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log probability of each text, in windows of max_seq_len tokens, of which each token is a decode step."""
        found = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.llm.config.max_seq_len - 1, context_len=1
            )
            parts = [(("", text), *make_disjoint_window(window)) for window in windows]
            found.append(sum(value for value, _ in self._loglikelihood_tokens(parts, disable_tqdm)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to a stop text or `max_gen_toks` tokens. Nothing is cut from a context."""
        found: list[str] = []
        for start in tqdm(range(0, len(requests), AT_ONCE), disable=disable_tqdm, desc="generate_until"):
            some = [request.args for request in requests[start : start + AT_ONCE]]
            prompts = [self.tok_encode(context) for context, _ in some]
            outputs = self.llm.generate(prompts, [self._sampling(given) for _, given in some])
            for args, output in zip(some, outputs, strict=True):
                found.append(output.text)
                self.cache_hook.add_partial("generate_until", args, output.text)
        return found

    def _sampling(self, given: dict[str, Any]) -> SamplingParams:
        """How a task wants its answer drawn; raises RequestError on what kvseek does not know."""
        wanted = dict(normalize_gen_kwargs(given))
        drawn = wanted.pop("do_sample")
        own = {"max_tokens": wanted.pop("max_gen_toks"), "stop": wanted.pop("until")}
        temperature = wanted.pop("temperature", 1.0 if drawn else 0.0)
        return SamplingParams(**own, temperature=temperature if drawn else 0.0, **wanted)


if __name__ == "__main__":
    cli_evaluate()
