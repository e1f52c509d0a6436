"""The messages between the server processes and the engine process: tagged msgspec structs as msgpack.

Promise: plain data only (no pickle, no tensors). Structs are positional: new fields are only appended and
have defaults, so that old and new versions can talk. `questions.py` has those that ask and answer.
"""

import msgspec

from minisgl.ipc.questions import Question, QuestionAnswer
from minisgl.request import RequestOutput, SamplingParams

IDS_PER_SERVER = 1 << 40
"""Server process r uses the request ids from r * IDS_PER_SERVER on, so that ids are unique."""
SLICE_REQUESTS = 128
"""A message adds at most about this many requests: adding them takes either process 1 to 2 ms."""
SLICE_BYTES = 1 << 19
"""A message has at most about this many bytes of prompts, for the same reason."""


class AddRequest(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Server -> engine: start one request, or several of a call. The engine answers each one."""

    request_id: int
    prompt_ids: bytes
    """Token ids as little-endian int32."""
    params: SamplingParams
    priority: int = 0
    """Larger runs sooner: one level counts like an arrival 1024 requests earlier (`queue/policy.py`)."""
    streamed: bool = True
    """The client reads tokens as they come, so `mixed_step_tokens` bounds the pauses between them."""
    num_choices: int = 1
    """Requests for each prompt (`request.params_for_choice`), with the ids that follow `request_id`."""
    more_prompts: tuple[bytes, ...] = ()
    """Further prompts with the same parameters; the ids of their choices follow."""
    seeds: tuple[int, ...] = ()
    """One seed for each request, in the order of their ids; () = `params` has a seed or is greedy."""
    cache_salt: str = ""
    """The requests share cached pages only with others of the same salt."""
    call_id: str = ""
    """The call's X-Request-Id, by which its requests are found; empty = none."""
    arrived_s: float = 0.0
    """When the call arrived, by `time.monotonic` of this host; 0 = unknown."""
    user: str = ""
    """Whose they are: users share the engine (scheduler/queue/shares.py). Any text; "" is a user, too."""
    outputs: tuple[bytes, ...] = ()
    """What each request has generated already, in an engine that has ended: token ids as little-endian int32.
    It goes on behind them, and its own outputs have only what is new. () = nothing yet."""
    waiting_since_s: float = 0.0
    """Since when it has waited for an engine to be started again, by `time.monotonic`; 0 = it has not."""

    def __post_init__(self) -> None:
        params = self.params
        assert self.seeds or params.seed is not None or params.temperature == 0, (
            "a request that samples needs a seed; who makes it draws one (minisgl/seeds.py)"
        )

    @property
    def num_requests(self) -> int:
        """Requests that this message starts."""
        return self.num_choices * (1 + len(self.more_prompts))


class AbortRequest(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Server -> engine: end this request with a final ABORT output. Ids of ended requests are ignored."""

    request_id: int


class Shutdown(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Server -> engine: shut down."""


class Ready(msgspec.Struct, tag=16, array_like=True, frozen=True):
    """Engine -> server, once: start-up is over and the engine takes requests."""

    max_context_tokens: int
    """Longest prompt + output of one request: the least of the model's, the flag's and the pool's limit."""
    num_pages: int
    page_size: int
    max_rows: int
    device: str
    startup_ms: dict[str, float]
    """Stage -> milliseconds, in order; the sum is the engine's start-up time."""
    choices: list[tuple[str, str, str]] = []
    """Settings that the engine runs with: flag, value, and why."""
    page_events: dict[str, str] = {}
    """Where page events are published: endpoint, replay_endpoint ("": none) and topic; empty: nowhere."""


class StartupStage(msgspec.Struct, tag=17, array_like=True, frozen=True):
    """Engine -> server, before `Ready`: a start-up stage is over. It also shows that the engine is alive."""

    name: str
    duration_ms: float


class StepOutput(msgspec.Struct, tag=18, array_like=True, frozen=True):
    """Engine -> server: all outputs of one step."""

    outputs: list[RequestOutput]


class Fatal(msgspec.Struct, tag=20, array_like=True, frozen=True):
    """Engine -> server, the last message: start-up or a step failed. It says what the user should do."""

    message: str
    is_user_error: bool = False
    """True = the settings or the model can't work; False = the engine broke."""
    is_device_fault: bool = False
    """The engine broke because its GPU, or another rank's, can't be used any more."""


ToEngine = AddRequest | AbortRequest | Shutdown | Question
ToServer = Ready | StartupStage | StepOutput | Fatal | QuestionAnswer
