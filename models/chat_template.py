"""Chat templates: from messages to the text a model was trained on.

A template writes special tokens (`<|im_start|>`); users write text. Where a user's text happens to spell a special
token, a random number is slipped between its first and second character before rendering, so that the rendered text
spells special tokens only where the template wrote them; `RenderedPrompt.parts` takes the numbers out again. The number
is made of digits because templates trim, split, lower and JSON-encode what they are given.

Knows messages and spellings, not token ids. Templates come with the model, never with a request.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.errors import InvalidRequest, ModelLoadError, UnsupportedParameter
from .metered_template import MeteredTemplate, TemplateLimit, TemplateRefusal

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES = 4096
DEFAULT_SECONDS = 2.0
DEFAULT_MAX_CHARS = 4 << 20
_MAX_DEPTH = 64  # nesting of tools, documents and template arguments
_REASONING = ("reasoning_content", "thinking", "reasoning")
_FIELDS = frozenset(("role", "content", "name", "tool_calls", "tool_call_id", *_REASONING))
# Set by us for every template; a caller's `chat_template_kwargs` cannot replace them.
_RESERVED = frozenset(
    (
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "chat_template",
        "continue_final_message",
        "tokenize",
    )
)


@dataclass(frozen=True)
class RenderedPrompt:
    """A rendered chat. `text` is what it reads; `marked` still has the numbers that keep users' spellings apart."""

    text: str
    marked: str
    number: str  # "" when no user text spelled a special token

    def parts(self, split: Callable[[str], Iterable[tuple[str, bool]]]) -> list[tuple[str, bool]]:
        """(text, is_special) in order; `split` cuts a text at special-token spellings."""
        return [
            (part.replace(self.number, "") if self.number and not special else part, special)
            for part, special in split(self.marked)
        ]


class ChatTemplate:
    """One model's template. `special_texts` are the spellings that must not arise from users' words."""

    def __init__(
        self,
        source: str,
        *,
        special_texts: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        name: str = "chat template",
    ) -> None:
        """`variables`: bos_token, eos_token and the like. Raises ModelLoadError if the source does not compile."""
        self.source = source
        self._variables = dict(variables or {})
        try:
            self._template = MeteredTemplate(source)
        except TemplateRefusal as error:
            raise ModelLoadError(f"{name}: {error}") from None
        self._spelling = spelling_pattern(special_texts)
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        seconds: float = DEFAULT_SECONDS,
        max_chars: int = DEFAULT_MAX_CHARS,
    ) -> RenderedPrompt:
        """Render a conversation. Raises InvalidRequest or UnsupportedParameter, in bounded time.

        `continue_final_message` leaves the last message open, so that the model goes on with it.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
            )
        kwargs = dict(template_kwargs or {})
        for word in kwargs:
            if word in _RESERVED or word.startswith("_"):
                raise InvalidRequest(f"chat_template_kwargs cannot set {word!r}", param="chat_template_kwargs")
        chat = check_messages(messages)
        if not self._knows_developer:
            chat = [{**message, "role": "system"} if message["role"] == "developer" else message for message in chat]
        number = _fresh_number()
        guard = _Guard(self._spelling, number)
        chat = guard.copy(chat, "messages")
        tag = f"{_fresh_number()} "
        if continue_final_message:
            _open_last(chat, tag)
        variables = {
            **guard.copy(kwargs, "chat_template_kwargs"),
            **self._variables,
            "messages": chat,
            "tools": guard.copy(list(tools), "tools") if tools else None,
            "documents": guard.copy(list(documents), "documents") if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(variables, seconds=seconds, max_chars=max_chars)
        except TemplateLimit as error:
            raise InvalidRequest(
                f"the chat template did not finish within its limits ({error.what})",
                param="messages",
                code="chat_template_limit",
            ) from None
        except TemplateRefusal as error:
            raise InvalidRequest(f"the chat template refused these messages: {error}", param="messages") from None
        if continue_final_message:
            text = _cut_at(text, tag)
        if not guard.used:
            return RenderedPrompt(text, text, "")
        return RenderedPrompt(text.replace(number, ""), text, number)


def spelling_pattern(texts: Sequence[str]) -> re.Pattern[str] | None:
    """Matches any of the texts, longest first; None when there are none."""
    wanted = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, wanted))) if wanted else None


# --------------------------------------------------------------------------------------------------------- the guard


class _Guard:
    """Copies callers' values as plain JSON types and breaks up special-token spellings in every string."""

    def __init__(self, spelling: re.Pattern[str] | None, number: str) -> None:
        self._spelling = spelling
        self._number = number
        self.used = False

    def copy(self, value: Any, param: str, depth: int = 0) -> Any:
        if depth > _MAX_DEPTH:
            raise InvalidRequest(f"{param}: nested deeper than {_MAX_DEPTH} levels", param=param)
        if isinstance(value, str):
            return self._text(value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {self._text(str(key)): self.copy(item, param, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.copy(item, param, depth + 1) for item in value]
        raise InvalidRequest(f"{param}: expected JSON values, got {type(value).__name__}", param=param)

    def _text(self, text: str) -> str:
        if self._spelling is None:
            return str(text)
        broken, count = self._spelling.subn(self._break, text)
        self.used = self.used or count > 0
        return broken

    def _break(self, match: re.Match[str]) -> str:
        found = match.group()
        return found[0] + self._number + found[1:]


def _fresh_number() -> str:
    """Twenty random digits. Unguessable, so no caller can have written them."""
    return f"{secrets.randbelow(10**20):020}"


def _open_last(chat: list[dict[str, Any]], tag: str) -> None:
    content = chat[-1].get("content")
    if not isinstance(content, str) or not content:
        raise InvalidRequest("continue_final_message needs text in the last message", param="messages")
    chat[-1]["content"] = content + tag


def _cut_at(text: str, tag: str) -> str:
    """Up to the tag; when the template trimmed the tag's own trailing space, it trims the message's too."""
    at = text.rfind(tag.strip())
    if at < 0:
        raise InvalidRequest(
            "continue_final_message: the chat template does not write the last message's content",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(tag, at) else text[:at].rstrip()


# ------------------------------------------------------------------------------------------------------- the messages


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as templates want them: content is text, absent fields are missing, tool arguments are objects.

    Text parts are joined by newlines. Raises InvalidRequest; UnsupportedParameter for content that is not text.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages: expected a list with at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages: expected at most {MAX_MESSAGES}, got {len(messages)}", param="messages")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where}: expected an object, got {_kind(message)}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        shown = repr(role[:40]) if isinstance(role, str) else _kind(role)
        raise InvalidRequest(f"{where}.role: expected one of {', '.join(ROLES)}, got {shown}", param=f"{where}.role")
    out: dict[str, Any] = {"role": role}
    for field, value in message.items():
        if field == "role" or value is None:
            continue
        if field in _FIELDS:
            out[field] = value
        elif field in ("audio", "function_call", "images", "image", "video"):
            raise UnsupportedParameter(f"{where}.{field} is not supported; content is text", param=f"{where}.{field}")
        elif field in ("refusal", "annotations"):  # clients send answers back as they got them
            continue
        else:
            raise InvalidRequest(f"{where}: unknown field {str(field)[:40]!r}", param=where)
    out["content"] = _text_of(message.get("content"), f"{where}.content")
    if out["content"] is None:
        del out["content"]
        if role != "assistant" or not ("tool_calls" in out or any(field in out for field in _REASONING)):
            raise InvalidRequest(f"{where}.content: expected text", param=f"{where}.content")
        out["content"] = ""
    for field in ("name", "tool_call_id", *_REASONING):
        if field in out and not isinstance(out[field], str):
            raise InvalidRequest(f"{where}.{field}: expected text, got {_kind(out[field])}", param=f"{where}.{field}")
    if "tool_calls" in out:
        out["tool_calls"] = _tool_calls(out["tool_calls"], f"{where}.tool_calls")
    reasoning = next((out[field] for field in _REASONING if field in out), None)
    if reasoning is not None:  # templates differ in the name they read
        out.update(reasoning_content=reasoning, thinking=out.get("thinking", reasoning))
    return out


def _text_of(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"{where}: expected text or a list of parts, got {_kind(content)}", param=where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            raise InvalidRequest(f"{where}[{index}]: expected an object with a type", param=f"{where}[{index}]")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise UnsupportedParameter(
                f"{where}[{index}]: parts of type {kind[:40]!r} are not supported by this model",
                param=f"{where}[{index}].type",
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}[{index}].text: expected text, got {_kind(text)}", param=f"{where}[{index}]")
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """OpenAI sends `arguments` as JSON text; templates want the object."""
    if not isinstance(calls, list | tuple):
        raise InvalidRequest(f"{where}: expected a list, got {_kind(calls)}", param=where)
    out = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{where}[{index}]: expected an object with function.name", param=f"{where}[{index}]")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                raise InvalidRequest(
                    f"{where}[{index}].function.arguments: expected JSON", param=f"{where}[{index}].function.arguments"
                ) from None
        out.append({**call, "function": {**function, "arguments": arguments if arguments is not None else {}}})
    return out


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
