"""`minisgl reload`: gives a running server's engines other settings or another model."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from minisgl.config import ReloadConfig
from minisgl.errors import ConfigError, EngineDeadError

PATHS = ("model", "tokenizer", "chat_template")
"""Settings that may name a file. The server may run in another folder."""


def run_reload(config: ReloadConfig, changes: Mapping[str, Any], stdout: TextIO) -> None:
    """Ask the server, wait until it is done, and print what was done.

    Args:
        changes: the settings that were given, by their names.

    Raises:
        ConfigError: the server refuses the settings or the key, or is not there.
        EngineDeadError: the new engine did not start.
    """
    body: dict[str, Any] = {**changes, "beside": config.beside}
    for name in PATHS:
        if isinstance(body.get(name), str) and Path(body[name]).expanduser().exists():
            body[name] = str(Path(body[name]).expanduser().resolve())
    answer = _post(config, json.dumps(body).encode())
    where = "beside the old ones" if answer["beside"] else "in the places of the old ones"
    what = "went on in them" if answer["streams"] == "moved" else "ended in the old ones"
    stdout.write(
        f"{answer['model']} is served after {answer['seconds']:.1f} s: {len(answer['engines'])} engines "
        f"started {where}; {answer['num_streams']} open requests {what}\n"
    )


def _post(config: ReloadConfig, body: bytes) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    if config.admin_key:
        headers["Authorization"] = f"Bearer {config.admin_key}"
    url = config.url.rstrip("/")
    try:
        request = urllib.request.Request(f"{url}/reload", body, headers, method="POST")
        with urllib.request.urlopen(request) as answer:  # without a limit: a model may load for minutes
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise _error_of(error, url) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"no server of minisgl answers at {url} ({reason}); see --url") from None


def _error_of(error: urllib.error.HTTPError, url: str) -> ConfigError | EngineDeadError:
    with error:
        try:
            told = json.load(error)["error"]
            message, code = str(told["message"]), str(told["code"])
        except (ValueError, KeyError, TypeError):
            return ConfigError(f"{url} is no server of minisgl, or one that can't reload")
    if error.code in (401, 403):
        message += "; give it as --admin-key"
    return EngineDeadError(message) if error.code >= 500 and code != "loading" else ConfigError(message)
