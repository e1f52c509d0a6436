"""Files that flags name."""

import json
from pathlib import Path
from typing import Any

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
