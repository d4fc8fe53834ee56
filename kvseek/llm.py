"""LLM: loads a model into this process and generates with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

from kvseek.core.errors import RequestError, require, typed
from kvseek.core.request import EndedSession, StepOutput

from .arguments import CHAT_NAMES, SCORE_NAMES, Message, Prompt, conversation_list, prompt_list, token_ids
from .base_llm import BaseLLM, RequestOptions, template_arguments
from .generation import Generation, GenerationError
from .outputs import OutputPiece, RequestOutput
from .prefix import Prefix
from .sampling_params import SamplingParams

Conversations = Sequence[Message] | Sequence[Sequence[Message]]
Params = SamplingParams | Sequence[SamplingParams] | None
Taken = TypeVar("Taken")


class LLM(BaseLLM):
    """A model that is loaded into this process; use it in a `with` statement, or call `close`.

    Any number of threads may call `generate` and `chat` at once; their requests are computed together, in batches.

    Parameters
    ----------
    model : str or path
        An engine directory of `kvseek build`; a checkpoint that it reads (docs/builder.md); or a name on the Hugging Face hub,
        whose files must be in Hugging Face's cache (`hf download NAME`). Of a checkpoint an engine is built into a cache
        folder, and found there the next time.
    method : str, optional
        Retrieval method: full, flat, pariskv, nested, ctkvr, clusterkv or prkv; nested if left out.
    device, dtype : str, optional
        "cpu" or "cuda"; "float32", "bfloat16" or, on cuda, "float16". cpu and float32 if left out.
    max_seq_len : int, optional
        Most tokens of a prompt and its answer; what the model allows, at most 131,072, if left out.
    max_batch_size : int, optional
        Most requests that are computed together; 4 if left out.
    tokenizer : path, optional
        Folder of the tokenizer, for checkpoints that come without one.
    **build_options
        Further options of `kvseek build` by their names: preset, text_only, mtp, max_input_len, prefill_chunk_tokens, kernels,
        weight_only_precision, weight_group, quantize_lm_head, runtime, cuda_archs; prefill_attention, prefill_precision;
        method_config, cache, tensorrt and block_sparse are dictionaries, such as ``method_config={"top_k": 200}``
        for ``--nested.top_k 200``.
    cache_dir : path, optional
        Folder of the engines that are built; ``~/.cache/kvseek/engines`` if left out.
    threads : int, optional
        CPU threads of the whole process (torch.set_num_threads).
    max_num_tokens : int
        Most prompt tokens that one step of the engine reads.
    disk_dir : path, optional
        Directory in which beginnings of prompts are kept, so that they need not be read again by another LLM either
        (docs/conversations.md); in memory alone if left out.
    disk_bytes : int, optional
        Most bytes of them; 16 GiB if left out.
    speculation : str, optional
        Steps verify drafts of several tokens, "ngram" from what prompt and output repeat, "mtp" by a hybrid's own head (build
        option mtp); the tokens are the same.
    num_speculative_tokens : int, optional
        Most tokens of a draft, 1 to 7; 7 if left out.
    quiet : bool
        Print no progress of building.

    Raises
    ------
    ConfigError
        There is no such model, or an option is unknown, out of range, or given for an engine directory, which has its own.
    EngineDirectoryError
        The engine directory is incomplete or damaged. An entry of the cache is built again instead.
    KernelError, CapacityError
        The engine's kernels cannot be compiled or do not run here; it does not fit into memory.
    """

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        stream: Literal[True],
        **options: Unpack[RequestOptions],
    ) -> Iterator[OutputPiece]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        stream: bool = False,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput] | Iterator[OutputPiece]:
        """Continue prompts.

        Parameters
        ----------
        prompts : str, sequence of int, or a sequence of these
            Texts or token ids. Texts get the special tokens with which the model expects a text to begin; ids get none.
        sampling_params : SamplingParams, or a sequence of them
            For all prompts, or one for each.
        stream : bool
            Give pieces as they come, those of different prompts mixed; leaving the iteration cancels what has not ended.
        priority : int
            0 to 255: of requests that wait, those with larger numbers start first.
        timeout : float, optional
            Seconds from the start, which with `stream` is the first step of the iteration. A request that still waits then
            fails, one that runs ends with what it has.
        session : str or Session, optional
            The conversation that the prompt continues, by its id: what has been read of it is kept rather than what other
            requests leave (docs/conversations.md).
        cache_salt : str, optional
            Only requests of the same salt share what has been read of their prompts.
        prefix : Prefix, optional
            What all prompts begin with; see `prefix`. Texts get no special tokens then.
        speculate : bool
            False: without drafts, where the LLM speculates.

        Returns
        -------
        list of RequestOutput, in the order of the prompts, or with `stream` an iterator of OutputPiece

        Raises
        ------
        RequestError, CapacityError
            The engine can never serve one of the prompts: raised at once, before any is started.
        GenerationError
            Requests failed while they ran, or their guides cannot be compiled: raised when all have ended, with the outputs
            of all.
        UnavailableError
            The LLM is closed, or its engine has failed.
        """
        listed = prompt_list(prompts)
        return self._answer(self._generations(listed, sampling_params, options), stream)

    @overload
    def chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        *,
        stream: Literal[False] = False,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        *,
        stream: Literal[True],
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[OutputPiece]: ...

    def chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        *,
        stream: bool = False,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput] | Iterator[OutputPiece]:
        """Answer conversations, written down by the model's own chat template.

        Parameters
        ----------
        messages : sequence of messages, or a sequence of conversations
            A message is a dictionary with "role" and "content", which are texts, and whatever else the model's chat template
            reads, such as "name"; a conversation is a sequence of them.
        sampling_params, stream, priority, timeout, session, cache_salt, prefix
            As of `generate`, and so are what is returned and raised. RequestError also if the model has no chat template,
            or the template fails on the messages.
        add_generation_prompt : bool, optional
            Whether the text goes on to where the model's answer begins; if left out, it does unless `continue_final_message`.
        continue_final_message : bool
            Whether the model goes on with the last message instead of answering it.
        chat_template_kwargs : mapping, optional
            Further variables of the template.
        """
        conversations = conversation_list(messages)
        template = template_arguments(add_generation_prompt, continue_final_message, chat_template_kwargs)
        return self._answer(self._generations(conversations, sampling_params, options, CHAT_NAMES, template), stream)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        *,
        logprobs: int = 0,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Compute the log probabilities of given continuations, a decode step for each token: what the method's selection costs.

        The first token's comes from reading its prompt, which is dense.

        Parameters
        ----------
        prompts : str, sequence of int, or a sequence of these
            As of `generate`, one for each continuation or for all.
        continuations : str, sequence of int, or a sequence of these
            A text is tokenised by itself, as it stands behind other text.
        logprobs : int
            Also return so many likeliest tokens of each step, at most 20.
        priority, timeout, session, cache_salt, prefix
            As of `generate`.

        Returns
        -------
        list of RequestOutput, in the order of the continuations
            `token_ids` are the continuation's, `logprobs` theirs, with the sum `cumulative_logprob`; `perplexity`.

        Raises
        ------
        RequestError, CapacityError, GenerationError, UnavailableError
            As `generate`.
        """
        listed, given = prompt_list(prompts), prompt_list(continuations, "continuations")
        params = []
        for number, one in enumerate(given):
            name = f"continuations[{number}]"
            ids = self.tokenizer.encode_inside(one) if isinstance(one, str) else token_ids(name, one)
            require(bool(ids), name, one, "at least one token", "leave it out", RequestError)
            params.append(SamplingParams(max_tokens=len(ids), forced_tokens=ids, logprobs=logprobs, ignore_eos=True))
        if len(listed) == 1:
            listed *= len(given)
        elif len(listed) != len(given):
            raise RequestError(
                f"continuations has {len(given)} entries: must be {len(listed)}, one for each prompt; or give one prompt for all"
            )
        return self._outputs(self._generations(listed, params, options, SCORE_NAMES))

    def prefix(self, beginning: Prompt | Sequence[Message], *, cache_salt: str | None = None) -> Prefix:
        """Read the beginning of many prompts once, such as a document that questions are asked about.

        Parameters
        ----------
        beginning : str, sequence of int, or sequence of messages
            A text or token ids, with which prompts of `generate` are to begin; or messages, with which conversations of `chat`
            are to begin.
        cache_salt : str, optional
            As of `generate`, of all requests with the prefix.

        Returns
        -------
        Prefix
            For a `with` statement: what was read is kept until its end.

        Raises
        ------
        RequestError, CapacityError, GenerationError, UnavailableError
            As `generate`. RequestError also of an engine that keeps nothing of prompts.
        """
        prefix, reading = self._prefix(beginning, cache_salt)
        self._outputs([reading])
        return prefix

    def end_session(self, session_id: str, *, cache_salt: str | None = None) -> EndedSession | None:
        """Forget a session and free what only it has used, which is returned; None if there is no such session.

        Raises
        ------
        UnavailableError
            The LLM is closed, or its engine has failed.
        """
        return self._end_session(session_id, cache_salt).result()

    def close(self) -> None:
        """End all requests and free the engine; no thread is left. May be called again."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, generations: Sequence[Generation], stream: bool) -> list[RequestOutput] | Iterator[OutputPiece]:
        return self._pieces(generations) if typed("stream", stream, bool) else self._outputs(generations)

    def _outputs(self, generations: Sequence[Generation]) -> list[RequestOutput]:
        for _ in self._run(generations, Generation.take, watched=False):
            pass
        return [one.output for one in generations if one.output is not None]

    def _pieces(self, generations: Sequence[Generation]) -> Iterator[OutputPiece]:
        """Yield the pieces of requests as they come."""
        for piece in self._run(generations, Generation.push, watched=True):
            if piece is not None:
                yield piece

    def _run(
        self, generations: Sequence[Generation], take: Callable[[Generation, StepOutput], Taken], *, watched: bool
    ) -> Iterator[Taken]:
        """Submit requests and yield what `take` makes of their outputs; `watched`: somebody wants each token as it comes.

        Requests that have not ended when the iteration is left are cancelled.
        """
        outputs: deque[StepOutput] = deque()
        arrived: SimpleQueue[None] = SimpleQueue()  # has an item where there are outputs
        arrive = partial(arrived.put, None)
        running: dict[int, Generation] = {}  # by the service's number
        try:
            for generation in generations:
                whole = not watched and not generation.stops
                number = self._service.start(generation.sequence, outputs.append, arrive, whole=whole)
                running[number] = generation
            while running:
                self._service.check_process()  # in a fork nothing would ever arrive
                arrived.get()
                while outputs:
                    output = outputs.popleft()
                    own = running.get(output.request_id)
                    if own is None:  # a token behind the end
                        continue
                    taken = take(own, output)
                    if own.output is not None:
                        del running[output.request_id]
                        if output.finish_reason is None:  # a stop text came, of which the engine does not know
                            self._service.cancel(output.request_id)
                    yield taken
        finally:
            for number in running:
                self._service.cancel(number)
        if any(one.output is not None and one.output.error for one in generations):
            raise GenerationError([one.output for one in generations if one.output is not None])
