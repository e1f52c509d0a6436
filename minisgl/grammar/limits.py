"""Limits of a grammar, as numbers; each refusal names the limit it met."""

MAX_SPEC_BYTES = 256 * 1024
"""UTF-8 bytes of a schema or of any other grammar; checked before anything is parsed."""
MAX_DEPTH = 64
"""Nested arrays and objects of a schema's JSON text; checked before it is parsed."""
MAX_PROPERTIES = 5_000
"""Properties of all objects of a schema together."""
MAX_OPTIONAL_PROPERTIES = 500
"""Properties of one object that are not required: any of them may come next, so each costs time per token."""
MAX_ALTERNATIVES = 500
"""Schemas of one anyOf, oneOf or allOf: each may go on, so each costs time per token."""
MAX_ENUM_VALUES = 10_000
"""Values of all `enum` of a schema together, and choices of a `choice`."""
MAX_PATTERN_CHARS = 4_096
"""Characters of one regular expression."""
MAX_REPEATS = 200_000
"""Largest count of one repetition in a regular expression."""
MAX_EXPANDED_CHARS = 20_000
"""Characters of a regular expression whose counted repetitions are written out; a class of characters with
its count is one."""
MAX_JOINED_PATTERNS = 8
"""Patterns and formats of a schema where several may hold for one string, and `&` of a grammar: their states
multiply, and the library builds them for minutes at 50, in gigabytes, without a way to stop it."""
MAX_LITERAL_CHARS = 10_000
"""Characters of one text that an answer must contain as it is: the time per token grows with it."""
MAX_COUNT = 1_000_000_000
"""Largest value of minLength, maxItems and the like."""
MAX_NUMBER = 2**53 - 1
"""Largest absolute value of a number in a schema: up to here every integer is exact in JSON everywhere."""
MAX_LARK_BYTES = 64 * 1024
"""UTF-8 bytes of a context-free grammar in text form."""
MAX_RULES = 500
"""Rules of a context-free grammar: the library's stack and its time grow with chains of them."""
MAX_LEVELS = 500
"""Schemas inside each other, those of all definitions together: the library's stack grows with them. It
overflows at about 1,600 in a stack of 8 MiB; the compiler's threads have eight times as much."""
MAX_TAGS = 512
"""Parts of a structural tag."""
COMPILE_LIMIT_S = 2.0
"""Seconds that compiling one grammar may take. Its request is refused then; the thread goes on until the
library is done, which the other limits bound."""
MAX_QUEUED = 512
"""Grammars that wait for one of a server's compiling threads; equal ones count once. Usual ones are compiled
at 400 per second, so that all of them take about a second."""
SLOW_MASK_S = 0.02
"""A mask that takes a thread longer than this is slow; usual ones take 0.0001 s."""
SLOW_BUDGET_S = 0.5
"""Seconds of slow masks, of all requests of one grammar, after which these requests end with an error."""
