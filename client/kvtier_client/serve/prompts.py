"""Messages and texts to tokens: the model's chat template, and its tokenizer.

Not here: tokens to text (`text`). Called on one thread of its own, since long texts take long and a tokenizer is not
made for several at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtier_client.serve.schema import ChatRequest, CompletionRequest, Message, Refused

_ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Prompter:
    """Of one model. `context` is how many tokens a prompt and its answer may have together."""

    tokenizer: Any
    context: int
    vocabulary: int
    """Token ids are below this."""

    def chat(self, request: ChatRequest) -> list[int]:
        if not self.tokenizer.chat_template:
            raise Refused("this model has no chat template: use /v1/completions, or a model tuned for chat")
        messages = [_plain(message, number) for number, message in enumerate(request.messages)]
        try:
            tokens = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # noqa: BLE001 (the template is the model's own program)
            raise Refused(f"the model's chat template refuses these messages: {error}", param="messages") from None
        return self._fitting([int(token) for token in tokens], request.limit, "messages")

    def completion(self, request: CompletionRequest) -> list[list[int]]:
        found: list[list[int]] = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                tokens = [int(token) for token in self.tokenizer(prompt).input_ids]
            else:
                tokens = prompt
                if not all(0 <= token < self.vocabulary for token in tokens):
                    raise Refused(f"prompt has tokens that are not from 0 to {self.vocabulary - 1}", param="prompt")
            found.append(self._fitting(tokens, request.limit, "prompt"))
        return found

    def text(self, prompt: str | list[int]) -> str:
        """As it is echoed."""
        return prompt if isinstance(prompt, str) else str(self.tokenizer.decode(prompt))

    def room(self, tokens: list[int], limit: int | None) -> int:
        """How many may be generated after `tokens`."""
        room = self.context - len(tokens)
        return room if limit is None else min(limit, room)

    def _fitting(self, tokens: list[int], limit: int | None, param: str) -> list[int]:
        if not tokens:
            raise Refused(f"{param} is empty: at least one token is needed", param=param)
        wanted = limit or 1
        if len(tokens) + wanted > self.context:
            raise Refused(
                f"This model's maximum context length is {self.context} tokens. However, you requested "
                f"{len(tokens) + wanted} tokens ({len(tokens)} in the {param}, {wanted} in the completion). Please "
                f"reduce the length of the {param} or completion.",
                param=param,
                code="context_length_exceeded",
            )
        return tokens


def _plain(message: Message, number: int) -> dict[str, Any]:
    """A message as templates know it. Raises Refused for what they would drop in silence."""
    where = f"messages[{number}]"
    if message.role not in _ROLES:
        raise Refused(
            f"{where}.role is {message.role!r}, which is not supported here: it may be {', '.join(_ROLES)}",
            param=f"{where}.role",
        )
    for name in ("tool_calls", "function_call"):
        if getattr(message, name):
            raise Refused(f"{where}.{name} is not supported here: put it into the text", param=f"{where}.{name}")
    if message.content is None:
        raise Refused(f"{where}.content is missing", param=f"{where}.content")
    plain = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content, where),
    }
    return plain | ({"name": message.name} if message.name else {})


def _text(content: str | list[dict[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Refused(
                f"{where}.content[{number}] is {part.get('type')!r}: only parts of type 'text' are supported here",
                param=f"{where}.content[{number}]",
            )
    return "".join(part["text"] for part in content)
