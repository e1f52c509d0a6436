"""What of JSON Schema is taken, and is it enforced exactly? The official suite, and BFCL's tool schemas.

    npm pack json-schema-test-suite                        # draft 4, in package/tests
    pip download --no-deps --no-binary jsonschema jsonschema     # its json/tests has the newer drafts
    pip download --no-deps bfcl-eval
    python bench/json_schema_suite.py package/tests/draft4 json/tests/draft2020-12 json/tests/draft7 \
        --bfcl bfcl_eval-*.whl --out bench/results/cpu/json-schema.json

Bars, also the exit code: of schemas that are taken, no invalid instance is accepted, in no order of its keys,
and no valid one in another order than the schema's; 99.9 % of BFCL's schemas are taken, 99 % of its possible
answers accepted. What is narrower than the standard is listed.
"""

import argparse
import itertools
import json
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from minisgl.errors import RequestError
from minisgl.grammar.compiler import GrammarCompiler
from minisgl.grammar.matcher import Grammar, GrammarError, Matcher
from minisgl.grammar.spec import json_schema_spec

DRAFTS = {
    "draft3": "http://json-schema.org/draft-03/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
EOS = "<eos>"
VOCAB = 300
MAX_ORDERS = 200
BFCL_FILES = (
    *("irrelevance", "live_irrelevance", "live_multiple", "live_parallel", "live_parallel_multiple"),
    *("live_relevance", "live_simple", "multiple", "parallel", "parallel_multiple", "simple_java"),
    *("simple_javascript", "simple_python"),
)
BFCL_TYPES = {
    "dict": "object", "HashMap": "object", "Hashtable": "object",
    "float": "number", "double": "number",
    "long": "integer", "short": "integer", "byte": "integer", "Bigint": "integer",
    "tuple": "array", "list": "array", "ArrayList": "array", "Array": "array",
    "Queue": "array", "Stack": "array",
    "String": "string", "char": "string",
    "bool": "boolean", "Boolean": "boolean",
    "any": None, "Any": None, "": None,
}  # fmt: skip
"""BFCL's names of types -> JSON Schema's; None = any type."""


class Grammars:
    """Compiles schemas for a tokenizer of single bytes."""

    def __init__(self) -> None:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=257,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[EOS],
            show_progress=False,
        )
        tokenizer.train_from_iterator([], trainer)
        self.tokenizer = tokenizer
        self.compiler = GrammarCompiler(tokenizer.to_str(), VOCAB, [0])

    def compile(self, schema: Any) -> Grammar:
        return self.compiler.compile(json_schema_spec(schema, "schema")).result()

    def accepts(self, grammar: Grammar, text: str) -> bool:
        matcher = Matcher(grammar)
        try:
            matcher.advance(self.tokenizer.encode(text).ids)
        except GrammarError:
            return False
        return matcher.may_end

    def accepts_value(self, grammar: Grammar, value: Any) -> bool:
        """Whether some spelling of the value is accepted, in any order of its keys."""
        return any(
            self.accepts(grammar, text)
            for one in itertools.islice(orders(value), MAX_ORDERS)
            for text in (json.dumps(one, ensure_ascii=False, separators=(",", ":")), json.dumps(one))
        )


def orders(value: Any) -> Iterator[Any]:
    """The value with its keys in every order."""
    if isinstance(value, dict):
        for keys in itertools.permutations(value):
            for parts in itertools.product(*([*itertools.islice(orders(value[key]), 6)] for key in keys)):
                yield dict(zip(keys, parts, strict=True))
    elif isinstance(value, list):
        for parts in itertools.product(*([*itertools.islice(orders(one), 6)] for one in value)):
            yield list(parts)
    else:
        yield value


def wrong_orders(schema: Any, value: Any) -> Iterator[dict[str, Any]]:
    """An object with its declared keys in each order but the schema's."""
    if not isinstance(schema, dict) or not isinstance(value, dict):
        return
    declared = [key for key in schema.get("properties", {}) if key in value]
    rest = {key: one for key, one in value.items() if key not in declared}
    for keys in itertools.islice(itertools.permutations(declared), 1, MAX_ORDERS):
        yield {**{key: value[key] for key in keys}, **rest}


def run_suite(folder: Path, grammars: Grammars) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Figures per keyword file, what is narrower than the standard, and what is wrong."""
    rows, narrower, wrong = [], [], []
    for file in sorted(folder.rglob("*.json")):
        name = str(file.relative_to(folder).with_suffix(""))
        figures: Counter[str] = Counter()
        for case in json.loads(file.read_text(encoding="utf-8")):
            schema = case["schema"]
            if isinstance(schema, dict) and "$schema" not in schema and folder.name in DRAFTS:
                schema = {"$schema": DRAFTS[folder.name], **schema}
            figures["schemas"] += 1
            try:
                grammar = grammars.compile(schema)
            except RequestError:
                figures["refused"] += 1
                continue
            figures["taken"] += 1
            for test in case["tests"]:
                where = f"{name}: {case['description']}: {test['description']}"
                if not test["valid"]:
                    figures["invalid"] += 1
                    if grammars.accepts_value(grammar, test["data"]):
                        figures["invalid accepted"] += 1
                        wrong.append(where)
                    continue
                figures["valid"] += 1
                if not grammars.accepts_value(grammar, test["data"]):
                    narrower.append(where)
                    continue
                figures["valid accepted"] += 1
                for other in wrong_orders(schema, test["data"]):
                    figures["other orders"] += 1
                    if grammars.accepts(grammar, json.dumps(other)):
                        figures["other orders accepted"] += 1
                        wrong.append(f"{where}: order {list(other)}")
        rows.append({"file": name, **figures})
    return rows, narrower, wrong


def bfcl_schema(schema: Any) -> Any:
    """BFCL's way to write a schema, as JSON Schema.

    Types have other names; `optional`, a flag `required` and `format` say nothing more (its checker ignores
    them); the default of a parameter is one of its values, whatever its type and its enum say.
    """
    if not isinstance(schema, dict):
        return schema
    out = {key: value for key, value in schema.items() if key not in ("type", "optional", "format")}
    if not isinstance(out.get("required", []), list):
        del out["required"]
    kind = BFCL_TYPES.get(schema.get("type", ""), schema.get("type"))
    if kind is not None:
        out["type"] = kind
    if "items" in out:
        out["items"] = bfcl_schema(out["items"])
    if "properties" in out:
        out["properties"] = {name: bfcl_schema(one) for name, one in out["properties"].items()}
        for name, one in out["properties"].items():
            if "default" in one and not Draft202012Validator(one).is_valid(one["default"]):
                out["properties"][name] = {"anyOf": [one, {"const": one["default"]}]}
    return out


def in_strings(schema: Any) -> Any:
    """BFCL gives the parameters of its Java and JavaScript functions as text of that language."""
    return {**schema, "properties": {name: {"type": "string"} for name in schema["properties"]}}


def lines_of(wheel: zipfile.ZipFile, name: str) -> list[dict[str, Any]]:
    if f"bfcl_eval/data/{name}" not in wheel.namelist():
        return []
    return [json.loads(line) for line in wheel.read(f"bfcl_eval/data/{name}").decode().splitlines() if line]


def answers_of(values: dict[str, list[Any]], required: list[str]) -> Iterator[dict[str, Any]]:
    """The calls that BFCL accepts: the i-th possible value of each parameter; "" stands for none."""
    for i in range(max((len(one) for one in values.values()), default=1)):
        call = {name: one[min(i, len(one) - 1)] for name, one in values.items() if one}
        call = {name: nested(one) for name, one in call.items() if one != ""}
        if all(name in call for name in required if name in values):
            yield call


def nested(value: Any) -> Any:
    """An object inside of an answer: BFCL lists the possible values of its parameters, too."""
    if isinstance(value, dict) and all(isinstance(one, list) for one in value.values()):
        return {name: nested(one[0]) for name, one in value.items() if one and one[0] != ""}
    if isinstance(value, list):
        return [nested(one) for one in value]
    return value


def in_order(schema: Any, value: Any) -> Any:
    """The value with its keys in the schema's order."""
    if isinstance(schema, dict) and "anyOf" in schema:  # a schema or its default
        schema = schema["anyOf"][0]
    if isinstance(schema, dict) and isinstance(value, dict):
        known = schema.get("properties", {})
        names = [*(name for name in known if name in value), *(name for name in value if name not in known)]
        return {name: in_order(known.get(name), value[name]) for name in names}
    if isinstance(schema, dict) and isinstance(value, list):
        return [in_order(schema.get("items"), one) for one in value]
    return value


def run_bfcl(path: Path, grammars: Grammars) -> dict[str, Any]:
    """How many of BFCL's schemas are taken, and of its answers accepted; the rest, with the reason."""
    figures: Counter[str] = Counter()
    refused, missed, against = [], [], []
    times: list[float] = []
    with zipfile.ZipFile(path) as wheel:
        for part in BFCL_FILES:
            answers = {
                one["id"]: one["ground_truth"]
                for one in lines_of(wheel, f"possible_answer/BFCL_v4_{part}.json")
            }
            for question in lines_of(wheel, f"BFCL_v4_{part}.json"):
                taken: dict[str, tuple[Any, Grammar]] = {}
                for tool in question["function"]:
                    figures["schemas"] += 1
                    schema = bfcl_schema(tool["parameters"])
                    began = time.perf_counter()
                    try:
                        taken[tool["name"]] = schema, grammars.compile(schema)
                        figures["taken"] += 1
                    except RequestError as error:
                        refused.append(f"{question['id']} {tool['name']}: {error.message}")
                    times.append(time.perf_counter() - began)
                for name, values in (
                    pair for call in answers.get(question["id"], ()) for pair in call.items()
                ):
                    if name not in taken:
                        continue
                    schema, grammar = taken[name]
                    is_text = part in ("simple_java", "simple_javascript")
                    if is_text:
                        schema = in_strings(schema)
                        grammar = grammars.compile(schema)
                    validator = Draft202012Validator(schema)
                    for answer in answers_of(values, schema.get("required", [])):
                        if is_text:
                            answer = {name: str(one) for name, one in answer.items()}
                        figures["answers"] += 1
                        wrong = next(validator.iter_errors(answer), None)
                        figures["answers that their schema allows"] += wrong is None
                        text = json.dumps(in_order(schema, answer), ensure_ascii=False)
                        if grammars.accepts(grammar, text):
                            figures["answers accepted"] += 1
                            assert wrong is None, text
                            continue
                        line = f"{question['id']} {name}: {text[:200]}"
                        if wrong is None:
                            missed.append(line)
                        else:
                            against.append(f"{line}: {wrong.json_path} {wrong.message[:120]}")
    times.sort()
    return {
        **figures,
        "compile_p50_ms": round(1e3 * times[len(times) // 2], 2),
        "compile_max_ms": round(1e3 * times[-1], 2),
        "refused": refused,
        "not accepted": missed,
        "answers that their schema does not allow": against,
    }


def table(rows: Iterable[dict[str, Any]]) -> str:
    head = ("file", "schemas", "taken", "refused", "valid", "accepted", "invalid", "accepted", "other orders")
    keys = (
        "schemas",
        "taken",
        "refused",
        "valid",
        "valid accepted",
        "invalid",
        "invalid accepted",
        "other orders",
    )
    lines = ["  ".join(f"{one:>12}" for one in head)]
    lines += ["  ".join([f"{row['file']:>12}", *(f"{row.get(key, 0):>12}" for key in keys)]) for row in rows]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, help="folders of test files, named by their draft")
    parser.add_argument("--bfcl", type=Path, help="the wheel of bfcl-eval")
    parser.add_argument("--out", type=Path, help="where to write the report")
    arguments = parser.parse_args()
    grammars = Grammars()
    report: dict[str, Any] = {"suites": {}}
    is_good = True
    for folder in arguments.folders:
        rows, narrower, wrong = run_suite(folder, grammars)
        report["suites"][folder.name] = {"files": rows, "narrower": narrower, "wrong": wrong}
        print(f"{folder.name}\n{table(rows)}\nnarrower than the standard:", *narrower, sep="\n  ")
        print("wrong:", *wrong, sep="\n  ")
        is_good &= not wrong
    if arguments.bfcl:
        found = report["bfcl"] = run_bfcl(arguments.bfcl, grammars)
        print(*(f"{name}: {value}" for name, value in found.items() if not isinstance(value, list)), sep="\n")
        for name, lines in found.items():
            if isinstance(lines, list):
                print(f"{name}:", *lines, sep="\n  ")
        is_good &= found["taken"] >= 0.999 * found["schemas"]
        is_good &= found["answers accepted"] >= 0.99 * found["answers"]
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
