"""The HTTP server's settings and their checks."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from minisgl.config.field_checks import LARGEST, MIB, check_types, require
from minisgl.errors import ConfigError
from minisgl.log import LEVELS

SUPERVISED = "-"
"""As --server of an engine: a supervisor says on stdin where the server is."""
SHORTEST_S = 0.01
LONGEST_S = 1e8
TEXT_FIELDS = (
    "served_model_name",
    "sampling_defaults",
    "chat_template",
    "tool_parser",
    "reasoning_parser",
    "special_tokens_in_content",
)
"""Fields of `ServerConfig` about the model's text, which a reload may change."""
SECONDS = f"a number of seconds up to {LONGEST_S:.0f}"


@dataclass(frozen=True, kw_only=True)
class ConnectConfig:
    """How an engine connects to its server ('minisgl engine')."""

    server: str = ""
    """Where the server lets engines in, as its --engine-listen: tcp://host:port. "-": a supervisor says it on
    stdin, and gets the engine's figures on stdout (minisgl/engine/remote/supervisor.py)."""
    engine_secret_file: str | None = None
    """File with the server's engine secret. Auto: MINISGL_ENGINE_SECRET has it."""
    drain_timeout_s: float = 30.0
    """Time that open requests get after SIGTERM before they go on in another engine. New calls go to others
    at once."""
    log_level: str = "info"
    """One of "debug", "info", "warning", "error"."""


@dataclass(frozen=True, kw_only=True)
class ReloadConfig:
    """Which server 'minisgl reload' changes, and how."""

    url: str = "http://127.0.0.1:8000"
    """URL of the server, without a path."""
    admin_key: str | None = None
    """The server's admin key. Set as MINISGL_ADMIN_KEY, it does not show in the list of processes."""
    beside: bool | None = None
    """Start the new engines while the old ones still run. Auto: where there is room (cpu, or spare GPUs)."""


def check_connect_config(config: ConnectConfig) -> None:
    """Refuse values by which no engine can connect.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """
    check_types(config)
    if config.server != SUPERVISED:
        check_endpoint("--server", config.server)
    require(0 <= config.drain_timeout_s <= LONGEST_S, "drain_timeout_s", SECONDS, config.drain_timeout_s)
    require(config.log_level in LEVELS, "log_level", "one of " + ", ".join(LEVELS), repr(config.log_level))


def check_endpoint(flag: str, endpoint: str) -> None:
    """Refuse what is not tcp://host:port.

    Raises:
        ConfigError: it is not.
    """
    if not re.fullmatch(r"tcp://([A-Za-z0-9_.*-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}", endpoint):
        raise ConfigError(f"{flag} must be as tcp://10.0.0.1:9000, got {endpoint!r}")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the HTTP server behaves."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all interfaces."""
    port: int = 8000
    """TCP port; 0 picks a free one and prints it."""
    served_model_name: str | None = None
    """Name clients must send as `model`. Auto: the value of --model; a folder's last part."""
    sampling_defaults: str = "model"
    """Source of the defaults for temperature, top_p, top_k, min_p and repetition_penalty: "model" (its
    generation_config.json) or "openai" (temperature 1 and nothing else)."""
    chat_template: str | None = None
    """File with a chat template (jinja2) in place of the model's own."""
    tool_parser: str | None = None
    """How the model writes calls of tools: "hermes", "qwen3_coder", "llama3_json" and others (an unknown name
    lists them); "none" switches it off. Auto: the model's own way, else a guess from its chat template."""
    reasoning_parser: str | None = None
    """How the model marks thoughts: "think", "mistral", "gemma4", "seed_oss" or "harmony"; "none" switches it
    off. Auto: as for --tool-parser."""
    special_tokens_in_content: bool = True
    """Texts such as <|im_end|> in the messages of a chat are special tokens, as with transformers, vLLM and
    SGLang. Off: only those that the chat template writes are, so no message can end its turn."""
    max_queued_requests: int = 1024
    """Open requests beyond which new ones get 429."""
    max_queued_tokens: int | None = None
    """Prompt tokens of requests without output yet, beyond which new requests get 429. Auto: no limit."""
    max_body_bytes: int = 16 * MIB
    """Largest request body; larger gets 413."""
    max_upload_bytes: int = 256 * MIB
    """Most bytes of all request bodies that are being read and tokenized at once; a body beyond gets 429."""
    upload_timeout_s: float = 60.0
    """A body that has not arrived after this long gets 408, and so does one that stalls (less than 1 KiB in
    10 s)."""
    keep_alive_timeout_s: float = 75.0
    """A connection without a call in progress is closed after this long: one that is idle, does not complete
    its headers, or does not read its answer. Proxies should close theirs earlier, as most do (60 s)."""
    request_timeout_s: float = 600.0
    """A request that gets no token for this long, in the queue or between two, is aborted with an error.
    An answer that keeps producing tokens may take any time."""
    drain_timeout_s: float = 30.0
    """Time that open requests get after SIGTERM before they are aborted."""
    heartbeat_timeout_s: float = 30.0
    """If the engine neither steps nor answers for this long, it counts as dead (--engine-restarts)."""
    engine_restarts: int | None = None
    """How often within 10 minutes an engine that died or hangs is started again; open answers go on. 0: the
    server ends with it. Auto: 3."""
    spare_process: bool | None = None
    """Keep a process that has imported all that an engine needs, so that a restart or a reload takes seconds
    less. It takes host memory (docs/operations.md), for each engine. Auto: on a GPU."""
    startup_timeout_s: float = 1800.0
    """The engine must be ready after this long (a first compilation of a large model takes minutes)."""
    api_key: tuple[str, ...] = ()
    """Clients must send one of these keys as "Authorization: Bearer KEY"; without any, none is needed. Set as
    MINISGL_API_KEY, it does not show in the list of processes."""
    api_keys_file: str | None = None
    """File of API keys with names, limits and priorities, a JSON object a line; 'minisgl api-key' makes
    them. SIGHUP reads it again. Keys of --api-key are taken beside it, without limits. Needs --api-workers
    1."""
    usage_log: str | None = None
    """File that gets a line of JSON with the token counts of every call. SIGHUP opens it again by its
    name."""
    admin_key: tuple[str, ...] = ()
    """Only clients that send it as "Authorization: Bearer KEY" may abort others' requests, flush the cache,
    use /debug and ask for a priority above 0. It also replaces --api-key. Without any, all clients may. Set
    as MINISGL_ADMIN_KEY, it does not show in the list of processes."""
    cors_origin: tuple[str, ...] = ()
    """Web pages from this origin may call the server, for example https://example.org; "*" = all."""
    allowed_host: tuple[str, ...] = ()
    """Without --api-key, calls may name this Host, for example llm.example.org; "*" = every name. Addresses,
    localhost, --host and this machine's own name are always allowed."""
    tls_cert: str | None = None
    """File with the certificate chain (PEM), for HTTPS; needs --tls-key."""
    tls_key: str | None = None
    """File with the certificate's private key (PEM)."""
    access_log: bool = False
    """Write a line of JSON to stderr for every HTTP call."""
    otlp_endpoint: str | None = None
    """Send a span for each call that generates text to this OpenTelemetry collector, by OTLP over HTTP, for
    example http://127.0.0.1:4318; needs minisgl[otel]."""
    replicas: int = 1
    """Engines behind this server, 1 to 64, each with the model in GPUs of its own: --tp of them each, on this
    host. Calls go where most of their prompt is cached, unless that engine is much busier. Needs
    --api-workers 1."""
    engine_listen: str | None = None
    """Have no engine of its own, but let engines connect here ('minisgl engine'): tcp://address:port, 0.0.0.0
    for all interfaces. They need the same secret (MINISGL_ENGINE_SECRET). Calls go to them as to those of
    --replicas."""
    engine_secret_file: str | None = None
    """File with the secret of --engine-listen, at least 16 characters. Auto: MINISGL_ENGINE_SECRET has it."""
    api_workers: int = 1
    """Server processes that share the port, 1 to 64: more of them tokenize and stream more. The limits on
    open requests and queued tokens are split among them."""
    log_level: str = "info"
    """One of "debug", "info", "warning", "error"; prompts are never logged above debug."""


def check_server_config(config: ServerConfig) -> None:
    """Refuse values that no server can run with.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """
    check_types(config)
    require(0 <= config.port <= 65535, "port", "between 0 and 65535", config.port)
    require(1 <= config.api_workers <= 64, "api_workers", "between 1 and 64", config.api_workers)
    require(1 <= config.replicas <= 64, "replicas", "between 1 and 64", config.replicas)
    if config.replicas > 1 and config.api_workers > 1:
        raise ConfigError(
            f"--replicas {config.replicas} needs --api-workers 1, got {config.api_workers}: one process "
            "chooses the engine of each call"
        )
    if config.engine_listen is not None:
        check_endpoint("--engine-listen", config.engine_listen)
    restarts = config.engine_restarts
    require(restarts is None or 0 <= restarts <= 100, "engine_restarts", "between 0 and 100", restarts)
    queued = config.max_queued_tokens
    require(queued is None or 1 <= queued <= LARGEST, "max_queued_tokens", f"between 1 and {LARGEST}", queued)
    for flag, keys in (("--api-key", config.api_key), ("--admin-key", config.admin_key)):
        for key in keys:
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise ConfigError(f"{flag} must be visible ASCII characters without spaces around them")
    if set(config.api_key) & set(config.admin_key):
        raise ConfigError(
            "--admin-key must differ from every --api-key; else clients could do what it guards"
        )
    for flag in ("api_keys_file", "usage_log"):
        require(getattr(config, flag) != "", flag, "the name of a file", "an empty text")
    if config.api_keys_file is not None and config.api_workers > 1:
        raise ConfigError(
            f"--api-keys-file needs --api-workers 1, got {config.api_workers}: one process counts what its "
            "limits are about"
        )
    for origin in config.cors_origin:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise ConfigError(
                f'--cors-origin must be as https://example.org, without a path, or "*"; got {origin!r}'
            )
    for name in config.allowed_host:
        if name != "*" and not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise ConfigError(
                "--allowed-host must be a name without scheme and port, as llm.example.org, "
                f'or "*"; got {name!r}'
            )
    if config.otlp_endpoint is not None:
        _check_otlp_endpoint(config.otlp_endpoint)
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together; give both or none")
    for flag in ("max_queued_requests", "max_body_bytes", "max_upload_bytes"):
        value = getattr(config, flag)
        require(1 <= value <= LARGEST, flag, f"between 1 and {LARGEST}", value)
    require(
        config.max_upload_bytes >= config.max_body_bytes,
        "max_upload_bytes",
        f"at least max_body_bytes ({config.max_body_bytes})",
        config.max_upload_bytes,
    )
    require(0 <= config.drain_timeout_s <= LONGEST_S, "drain_timeout_s", SECONDS, config.drain_timeout_s)
    for flag in (
        "request_timeout_s",
        "upload_timeout_s",
        "keep_alive_timeout_s",
        "heartbeat_timeout_s",
        "startup_timeout_s",
    ):
        value = getattr(config, flag)
        require(SHORTEST_S <= value <= LONGEST_S, flag, f"{SECONDS}, at least {SHORTEST_S}", value)
    require(
        config.sampling_defaults in ("model", "openai"),
        "sampling_defaults",
        "one of model, openai",
        repr(config.sampling_defaults),
    )
    require(config.log_level in LEVELS, "log_level", "one of " + ", ".join(LEVELS), repr(config.log_level))


def _check_otlp_endpoint(url: str) -> None:
    wrong = ConfigError(f"--otlp-endpoint must be as http://127.0.0.1:4318; got {url!r}")
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a malformed port or address
        raise wrong from None
    if not is_url or parts.query or parts.fragment or not url.isprintable() or " " in url:
        raise wrong
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "--otlp-endpoint must have no user and password, which show in the list of processes; "
            "set OTEL_EXPORTER_OTLP_HEADERS instead"
        )
