"""What commands read: files that flags name, the prompt on stdin, the engine secret."""

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from minisgl.errors import ConfigError, RequestError


def read_file(flag: str, file: Path) -> str:
    """The text of the file that a flag names.

    Raises:
        ConfigError: it can't be read.
    """
    try:
        return file.expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {file} can't be read: {error}") from None


def read_tools_file(file: Path) -> list[dict[str, Any]]:
    """The tools in a JSON file.

    Raises:
        ConfigError: it can't be read, or holds no list of tools.
    """
    from minisgl.replies.tools import read_tools  # lazy: other commands do not need it

    try:
        tools = json.loads(read_file("--tools", file))
        if not isinstance(tools, list):
            raise ConfigError(f"--tools {file} must hold a JSON list of tools")
        read_tools(tools, None)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--tools {file} is no JSON: {error}") from None
    except RequestError as error:
        raise ConfigError(f"--tools {file}: {error.message}") from None
    return tools


def read_secret(file: str | None, environ: Mapping[str, str]) -> str:
    """The secret that a server shares with engines from elsewhere: of a file, else of MINISGL_ENGINE_SECRET.

    Raises:
        ConfigError: there is none, or the file can't be read.
    """
    secret = environ.get("MINISGL_ENGINE_SECRET", "")
    if file is not None:
        secret = read_file("--engine-secret-file", Path(file)).strip()
    if not secret:
        raise ConfigError(
            "a server and the engines that connect to it need a shared secret: set MINISGL_ENGINE_SECRET or "
            "give --engine-secret-file; 'openssl rand -hex 32' makes one"
        )
    return secret


def prompt_from(given: str | None, stdin: TextIO) -> str:
    """The prompt `given` on the command line; if it is None or "-", the text of stdin.

    One final newline of stdin, as `echo` writes it, is removed.

    Raises:
        ConfigError: the prompt is missing, empty, or not valid UTF-8.
    """
    prompt = given
    if prompt is None or prompt == "-":
        if prompt is None and stdin.isatty():
            raise ConfigError('give a prompt: minisgl generate "Once upon a time" ("-" reads stdin)')
        prompt = stdin.read().removesuffix("\n")
    if not prompt:
        raise ConfigError('the prompt is empty; give one: minisgl generate "Once upon a time"')
    check_utf8("the prompt", prompt)
    return prompt


def check_utf8(name: str, text: str) -> None:
    """Refuse text that has bytes which are no characters.

    Raises:
        ConfigError: it has.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is not valid UTF-8 (at character {error.start})") from None


def tolerate_odd_characters() -> None:
    """Make stdin and the outputs tolerate characters outside their encoding.

    Invalid bytes on stdin become surrogates, which `check_utf8` and the tokenizer refuse. Characters that
    the terminal can't show are printed as "?".
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, io.TextIOWrapper):  # a stream is None if the parent closed it
            stream.reconfigure(errors=errors)
