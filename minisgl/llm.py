"""`LLM`: generate, chat and stream in the caller's own process, without sockets or a server.

Promise: prompts, lengths and stop strings follow the server's rules; a refused or abandoned request leaves
nothing in the engine.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

from minisgl.config import EngineConfig, check_engine_config, with_cache_dir
from minisgl.errors import ConfigError, MinisglError, RequestError
from minisgl.offline import Completion, Delta, OfflineDriver, Reply, ToolCall, check_prompt
from minisgl.progress import Progress, ShownProgress, lines_on, no_progress
from minisgl.replies.conversation import Conversation, EncodedCall
from minisgl.replies.model import load_text
from minisgl.replies.plan import ReplyPlan, ReplyReader
from minisgl.replies.tools import AskedTools, new_call_id, read_tools
from minisgl.request import SamplingParams, TokenLogprobs, with_bad_words_ids
from minisgl.text.bad_words import bad_words_ids
from minisgl.text.formats.events import Content, collect
from minisgl.text.messages import normalize_messages
from minisgl.text.reply import ReplyText
from minisgl.text.stop import StopStrings
from minisgl.weights.sources import default_cache_dir, resolve_model_folder

Message = Mapping[str, Any]
"""{"role": ..., "content": ...} as in the chat API."""
Prompt = str | list[int]


def _no_stage(name: str, duration_ms: float) -> None:
    pass


class LLM:
    """A model in this process. On cuda, use it only from the thread that made it.

    Args:
        model: a built-in name, a local folder, or a hub name; fetched when missing.
        cache_dir: folder of built-in models and compiled code; None = ~/.cache/minisgl.
        progress: called while a model is fetched.
        on_stage: called with each start-up stage's name and milliseconds.
        chat_template: a file in place of the model's own template.
        tool_parser: how the model writes calls (docs/tools.md); None = the model's own way, or a guess.
        reasoning_parser: likewise, for thoughts.
        engine: fields of `EngineConfig` (dtype="bfloat16", num_pages=512 ...).

    Raises:
        ConfigError: an unknown or impossible setting.
        ModelError: the model can't be found, fetched or loaded.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        cache_dir: Path | None = None,
        progress: Progress = no_progress,
        on_stage: Callable[[str, float], None] = _no_stage,
        chat_template: str | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        **engine: Any,
    ) -> None:
        known = [field.name for field in fields(EngineConfig)]
        for name in engine:
            if name not in known:
                raise ConfigError(f"LLM has no setting {name!r}; there are: {', '.join(known)}")
        config = EngineConfig(model=model, **engine)
        check_engine_config(config)
        if config.compile_cache is None:
            config = with_cache_dir(config, cache_dir or default_cache_dir())
        started = time.perf_counter()
        folder = resolve_model_folder(
            model,
            revision=config.revision,
            tokenizer=config.tokenizer,
            with_weights=not config.dummy_weights,
            cache_dir=cache_dir,
            progress=progress,
        )
        self._text = load_text(
            folder, chat_template=chat_template, tool_parser=tool_parser, reasoning_parser=reasoning_parser
        )
        self._tokenizer = self._text.tokenizer
        prepared = time.perf_counter()
        on_stage("find model, read tokenizer", 1e3 * (prepared - started))
        # Imported here because torch takes seconds to import and the errors above should come before.
        from minisgl.engine.start.build import build_engine

        on_stage("import torch and engine", 1e3 * (time.perf_counter() - prepared))
        stop_strings = lru_cache(maxsize=8)(StopStrings)  # requests of a batch share one table
        self._driver = OfflineDriver(
            build_engine(config, folder, on_stage),
            lambda prompt_ids, params, kept_special: ReplyText(
                self._tokenizer, prompt_ids, params, stop_strings(params.stop), kept_special
            ),
            config.seed,
        )

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt + output of one request, in tokens."""
        return self._driver.max_context_tokens

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        n: int = 1,
    ) -> list[Completion]:
        """Complete all prompts (text, or token ids) in one batch; results are in the prompts' order.

        `params` is one for all prompts, one per prompt, or None for `SamplingParams()`. `progress` shows
        on stderr how many have ended. The `n` completions of a prompt are consecutive.

        Raises:
            RequestError: a prompt or parameter is refused; with several prompts the message names the first
                refused one's index. The whole batch is aborted then.
        """
        batch = _as_batch(prompts)
        return self._run([partial(self._encode, prompt) for prompt in batch], params, progress, n)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        n: int = 1,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Answer one or several conversations, rendered by the model's chat template.

        `tools`, `tool_choice` and `parallel_tool_calls` are those of /v1/chat/completions, for all of the
        conversations, as are `chat_template_kwargs`, variables of the template. The completions have thoughts
        and calls apart from the text.

        Raises:
            RequestError: as for `generate`; for messages that the template can't render; for tools that are
                invalid, that the model can't be given, or whose calls can't be guaranteed as asked.
        """
        asked = read_tools(tools, tool_choice, parallel_tool_calls)
        variables = chat_template_kwargs or {}
        chats = _as_conversations(messages)
        encode = [partial(self._encode_chat, chat, asked, variables) for chat in chats]
        return self._run(encode, params, progress, n)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
    ) -> Iterator[Delta]:
        """Yield the reply to a text, token ids or a conversation, step by step; `tools` as for `chat`.

        Closing the iterator early aborts the request. Several may be open at once.

        Raises:
            RequestError: at once if prompt or parameters are invalid; while iterating if the engine refuses.
        """
        (own,) = _as_params(params, 1)
        if _is_sequence(prompt) and len(prompt) and isinstance(prompt[0], Mapping):
            asked = read_tools(tools, tool_choice)
            encoded = self._encode_chat(cast(Sequence[Message], prompt), asked, {}, own)
        elif tools:
            raise RequestError(400, "invalid_value", "tools go only with a conversation", "tools")
        else:
            encoded = self._encode(cast(Prompt, prompt), own)
        return self._deltas(self._check(encoded))

    def close(self) -> None:
        """Free the model's memory; the object can't be used afterwards. May be called twice."""
        self._driver.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt, params: SamplingParams) -> EncodedCall:
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt, True, max_tokens=self.max_context_tokens)
        elif _is_sequence(prompt):
            ids = list(prompt)
        else:
            raise RequestError(400, "invalid_type", WRONG_PROMPT, "prompt")
        return EncodedCall([ids], ReplyPlan(params))

    def _encode_chat(
        self,
        messages: Sequence[Message],
        asked: AskedTools,
        variables: Mapping[str, Any],
        params: SamplingParams,
    ) -> EncodedCall:
        conversation = Conversation(normalize_messages(messages), asked, variables)
        return conversation.encode(self._text, self.max_context_tokens, params)

    def _check(self, encoded: EncodedCall) -> EncodedCall:
        """With parameters for the engine: fitted to the prompt's length, with bad words as token ids."""
        plan = encoded.plan
        fitted = check_prompt(list(encoded.prompts[0]), plan.params, self.max_context_tokens)
        if fitted.bad_words:
            fitted = with_bad_words_ids(fitted, bad_words_ids(self._tokenizer, fitted.bad_words))
        return encoded._replace(plan=plan._replace(params=fitted))

    def _deltas(self, encoded: EncodedCall) -> Iterator[Delta]:
        plan = encoded.plan
        reader = plan.reader()
        reply = self._driver.submit(list(encoded.prompts[0]), plan.params, kept_special=plan.kept_special)
        try:
            while reply.is_readable or not reply.ended:
                self._driver.wait([reply])
                for delta in reply.read():
                    yield _read(delta, reader)
        finally:
            self._driver.abandon(reply)

    def _run(
        self,
        prompts: Sequence[Callable[[SamplingParams], EncodedCall]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
        n: int,
    ) -> list[Completion]:
        """Check all prompts, submit all, step until all replies have ended; abandon the rest on an error."""
        each = _as_params(params, len(prompts))
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise RequestError(
                400, "invalid_value", f"n must be a whole number of at least 1, got {n!r}", "n"
            )
        ready: list[EncodedCall] = []
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            with_index = index if len(prompts) > 1 else None
            try:
                ready.append(self._check(prompt(own)))
            except RequestError as error:
                raise _named(error, with_index) from error
        collected: list[list[Delta]] = [[] for _ in range(len(ready) * n)]
        replies: list[Reply] = []
        try:
            for (prompt_ids,), plan in ready:
                replies += self._driver.submit_choices(
                    list(prompt_ids), plan.params, n, streamed=False, kept_special=plan.kept_special
                )
            unfinished = dict(enumerate(replies))
            with ShownProgress(lines_on()) if progress else nullcontext(no_progress) as report:
                while unfinished:
                    report("generating", len(replies) - len(unfinished), len(replies), "completions")
                    self._driver.wait(list(unfinished.values()))
                    for index, reply in list(unfinished.items()):
                        try:
                            collected[index] += reply.read()
                        except RequestError as error:
                            raise _named(error, index // n if len(prompts) > 1 else None) from error
                        if reply.ended and not reply.is_readable:
                            del unfinished[index]
                report("generating", len(replies), len(replies), "completions")
        finally:
            for reply in replies:
                self._driver.abandon(reply)
        return [
            _completion(deltas, ready[index // n].plan.reader(), collected[index // n * n][0].prompt_logprobs)
            for index, deltas in enumerate(collected)
        ]


WRONG_PROMPT = "a prompt must be a text or a list of token ids, several prompts a list of those"


def _is_sequence(value: object) -> bool:
    """Whether the value is a list or tuple, which may hold prompts, token ids, messages or parameters."""
    return isinstance(value, list | tuple)


def _as_batch(prompts: str | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not _is_sequence(prompts) or any(not isinstance(prompt, str | list | tuple) for prompt in prompts):
        raise RequestError(400, "invalid_value", f"{WRONG_PROMPT} ([[1, 2, 3]])", "prompt")
    return list(prompts)


def _as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    if _is_sequence(messages) and messages and all(_is_sequence(chat) for chat in messages):
        return list(cast(Sequence[Sequence[Message]], messages))
    return [cast(Sequence[Message], messages)]  # `normalize_messages` refuses anything else


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    each = [params] * count if isinstance(params, SamplingParams) else params
    if not _is_sequence(each) or not all(isinstance(own, SamplingParams) for own in each):
        raise RequestError(
            400,
            "invalid_type",
            "params must be a SamplingParams, as SamplingParams(max_tokens=100)",
            "params",
        )
    if len(each) != count:
        raise RequestError(
            400, "invalid_value", f"{count} prompts need one SamplingParams or {count}, got {len(each)}"
        )
    return list(each)


def _named(error: RequestError, index: int | None) -> RequestError:
    """The same refusal with the prompt's index in its message."""
    message = error.message if index is None else f"prompt {index}: {error.message}"
    return RequestError(error.status, error.code, message, error.param)


def _read(delta: Delta, reader: ReplyReader) -> Delta:
    """The delta of a reply with what it says."""
    events = tuple(reader.read(delta))
    text = "".join(event.text for event in events if isinstance(event, Content))
    return replace(delta, text=text, events=events)


def _completion(
    deltas: list[Delta], reader: ReplyReader, prompt_logprobs: tuple[TokenLogprobs, ...] | None
) -> Completion:
    """Join a reply's deltas; the prompt's log probabilities came with its first choice."""
    last = deltas[-1]
    if last.finish_reason is None:
        raise MinisglError("a reply ended without a finish reason; this is a bug in minisgl")
    reply = collect(event for delta in deltas for event in reader.read(delta))
    return Completion(
        text=reply.content,
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        finish_reason=last.finish_reason,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
        logprobs=None
        if last.logprobs is None
        else tuple(entry for delta in deltas for entry in delta.logprobs or ()),
        prompt_logprobs=prompt_logprobs,
        reasoning=reply.reasoning,
        num_reasoning_tokens=reader.num_reasoning_tokens,
        tool_calls=tuple(
            ToolCall(id=new_call_id(), name=call.name, arguments=call.arguments, complete=call.complete)
            for call in reply.calls
        ),
    )
