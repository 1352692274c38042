"""How prompts are sent, and what has been said so far in one session."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_lab.serving.client import GenerateRequest, Reply
from hicache_lab.serving.client.stream import Api
from hicache_lab.serving.load.plans import Form, Tokens, as_text


@dataclass(frozen=True)
class Target:
    """How prompts are sent: the endpoint, the model's name, the sampling.

    Attributes:
        api: ``generate`` (token ids or text), ``completions`` (both) or ``chat`` (text).
        model: name for the OpenAI-style endpoints.
        temperature: 0 is greedy.
        ignore_eos: answers as long as asked for.
    """

    api: Api = "generate"
    model: str = "default"
    temperature: float = 0.0
    ignore_eos: bool = True


class Conversation:
    """What was said so far in one session, in the form the endpoint takes."""

    def __init__(self, target: Target, form: Form) -> None:
        self._target, self._form = target, form
        self._ids: Tokens = ()
        self._text = ""
        self._messages: tuple[tuple[str, str], ...] = ()
        self.tokens = 0

    def request(self, tokens: Tokens, max_new_tokens: int) -> GenerateRequest:
        """The next prompt; ``tokens`` then counts the conversation and the answer to come."""
        self.tokens += len(tokens) + max_new_tokens
        options = self._target
        prompt: Tokens | str
        if self._form == "ids":
            prompt = self._ids + tokens
        else:
            prompt = as_text(tokens) if options.api == "chat" else self._text + as_text(tokens)
        return GenerateRequest(
            prompt,
            max_new_tokens,
            options.api,
            options.model,
            options.temperature,
            options.ignore_eos,
            self._messages,
        )

    def answered(self, request: GenerateRequest, reply: Reply) -> None:
        """Take the answer into the conversation."""
        if not isinstance(request.prompt, str):
            self._ids = request.prompt + reply.output_ids
        elif self._target.api == "chat":
            self._messages += (("user", request.prompt), ("assistant", reply.text))
        else:
            self._text = request.prompt + reply.text
