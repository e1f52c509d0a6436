"""Builds a chat template's messages from the items or blocks of APIs that are not chat completions.

Promise: instructions at the beginning are one system message. Later ones stay where they are, so that the
prefix cache still finds what stands before them; if the template takes no late system message, they are the
user's. What the assistant said, thought and called between two other turns is one message.
"""

from typing import Any

from minisgl.text.messages import arguments_text


class Turns:
    """The conversation so far. `where` names the part of the body at fault in errors.

    Args:
        separator: stands between the texts of one turn.
        late_system: whether the template takes system messages that are not the first.
    """

    def __init__(self, separator: str, late_system: bool) -> None:
        self._separator = separator
        self._late_system = late_system
        self._joins_user = False  # the user's last turn has instructions, and the next one belongs to it
        self._system: list[str] = []
        self._messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of the functions called, by the call's id

    def messages(self) -> list[dict[str, Any]]:
        """The messages in the form of `normalize_messages`."""
        system = "\n\n".join(self._system)
        return ([{"role": "system", "content": system}] if system else []) + self._messages

    @property
    def last_role(self) -> str | None:
        """The role of the last turn."""
        return self._messages[-1]["role"] if self._messages else None

    def add_system(self, text: str) -> None:
        """Instructions."""
        if not text:
            return
        if not self._messages:
            self._system.append(text)
        elif self._late_system:
            self._messages.append({"role": "system", "content": text})
        else:
            self.add_user(text, joined=True)
            self._joins_user = True

    def add_user(self, text: str, joined: bool = False) -> None:
        """A user's turn; `joined`: more of the last turn, if that is the user's."""
        is_joined = (joined or self._joins_user) and self.last_role == "user"
        self._joins_user = False
        if is_joined:
            self._messages[-1]["content"] += (self._separator or "\n\n") + text
        else:
            self._messages.append({"role": "user", "content": text})

    def add_thought(self, text: str) -> None:
        """What the assistant thought before what follows."""
        if text:
            message = self._assistant()
            message["reasoning_content"] = message.get("reasoning_content", "") + text

    def add_reply(self, text: str) -> None:
        """What the assistant said."""
        message = self._assistant()
        message["content"] += (self._separator if message["content"] else "") + text

    def add_call(self, call_id: str, name: str, arguments: str | dict[str, Any], where: str) -> None:
        """A call that the assistant made.

        Raises:
            RequestError: 400 if `arguments` are no JSON object.
        """
        function = {"name": name, "arguments": arguments_text(arguments, where)}
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)
        self._names[call_id] = name

    def add_result(self, call_id: str, text: str) -> None:
        """What a call returned."""
        message = {"role": "tool", "tool_call_id": call_id, "content": text}
        if call_id in self._names:
            message["name"] = self._names[call_id]
        self._messages.append(message)

    def _assistant(self) -> dict[str, Any]:
        """The assistant's turn that goes on, or a new one."""
        if self.last_role != "assistant":
            self._messages.append({"role": "assistant", "content": ""})
        return self._messages[-1]
