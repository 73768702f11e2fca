"""Answers of a JSON schema, drawn at temperature 1 from the real model: each that is finished validates.

The schemas are those of the JSON-Schema Test Suite that llguidance can follow (the suite comes with the sources of the
package `jsonschema`, which judges), and the arguments of ten tools.
"""

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from ferrum_jax import LLM, EngineConfig, SamplingParams
from ferrum_jax.contract.errors import RequestValidationError
from ferrum_jax.generate.structured import FormCompiler, Structured
from tests.long import SEED

regex: Any = pytest.importorskip("regex", reason="comes with transformers")
jsonschema: Any = pytest.importorskip("jsonschema", reason="comes with the extra `reference`")
pytestmark = [pytest.mark.reference, pytest.mark.slow]

DRAFTS = {"draft4": "Draft4", "draft6": "Draft6", "draft7": "Draft7", "draft2019-09": "Draft201909"} | {
    "draft2020-12": "Draft202012"
}
ANSWERS = 500  # in all at least


def _tool(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


TEXT, WHOLE = {"type": "string", "maxLength": 20}, {"type": "integer", "minimum": 0, "maximum": 100}
TOOLS = {
    "get_weather": _tool(["city"], city=TEXT, unit={"enum": ["celsius", "fahrenheit"]}),
    "search": _tool(["query"], query=TEXT, limit=WHOLE, safe={"type": "boolean"}),
    "send_mail": _tool(
        ["to", "subject"], to={"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3}, subject=TEXT
    ),
    "create_event": _tool(
        ["title", "start"],
        title=TEXT,
        start={"type": "string", "pattern": r"^20\d\d-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d$"},
        minutes={"type": "integer", "enum": [15, 30, 60]},
    ),
    "transfer": _tool(
        ["amount", "currency"],
        amount={"type": "number", "exclusiveMinimum": 0, "maximum": 10000},
        currency={"type": "string", "pattern": "^[A-Z]{3}$"},
        reference={"anyOf": [TEXT, {"type": "null"}]},
    ),
    "query_table": _tool(
        ["table", "where"],
        table={"enum": ["orders", "users"]},
        where={
            "type": "array",
            "items": _tool(["column", "is"], column=TEXT, **{"is": {"type": ["string", "number"], "maxLength": 9}}),
            "maxItems": 2,
        },
    ),
    "set_light": _tool(["room", "level"], room=TEXT, level=WHOLE, hue={"type": "string", "pattern": "^#[0-9a-f]{6}"}),
    "book_room": _tool(["guests"], guests=_tool(["adults"], adults={"type": "integer", "minimum": 1, "maximum": 9})),
    "run_tests": _tool(["paths"], paths={"type": "array", "items": TEXT, "maxItems": 2}, verbose={"type": "boolean"}),
    "stop": _tool([]),
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the suite's drafts."""
    folder = tmp_path_factory.mktemp("suite")
    asked = f"jsonschema=={version('jsonschema')}"
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema"]
    subprocess.run([*fetch, "-d", folder, asked], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("jsonschema-*/json/tests"))


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    engine = EngineConfig(dtype="float32", max_seqs=8, kv_capacity=192, decode_rows=(8,))
    with LLM(smollm2_path, engine=engine, progress=False) as one:
        yield one


def supported(suite: Path, compiler: FormCompiler) -> dict[str, tuple[str, str]]:
    """The schemas of the suite that can be followed, each once: its draft and its text."""
    found: dict[str, tuple[str, str]] = {}
    for draft in DRAFTS:
        for path in sorted((suite / draft).rglob("*.json")):
            for case in json.loads(path.read_text()):
                text = json.dumps(case["schema"], sort_keys=True)
                try:
                    compiler.compile(Structured(json=text))
                except RequestValidationError:
                    continue
                found.setdefault(text, (draft, f"{draft}/{path.name}: {case['description']}"))
    return found


def exact(text: str) -> Any:
    """Reads JSON whose fractions are as written, so that 1.3712 is a multiple of 0.0001."""
    return json.loads(text, parse_float=Decimal)


@pytest.fixture
def patterns_of_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the judge read patterns such as `\\p{Letter}`, which Python's own `re` cannot."""
    for module in ("_keywords", "_utils", "_legacy_keywords"):
        monkeypatch.setattr(f"jsonschema.{module}.re", regex)


@pytest.mark.usefixtures("patterns_of_schemas")
def test_every_finished_answer_validates(suite: Path, llm: LLM):
    print(f"SEED={SEED}")
    schemas = supported(suite, FormCompiler(llm.tokenizer, llm.model.config.vocab_size))
    schemas |= {json.dumps(schema): ("draft2020-12", name) for name, schema in TOOLS.items()}
    each = -(-ANSWERS // len(schemas))
    prompts = [f"A JSON value, {name}:\n" for _, name in schemas.values()]
    params = [
        SamplingParams(max_tokens=96, temperature=1.0, seed=SEED, n=each, structured=Structured(json=text))
        for text in schemas
    ]
    outs = llm.generate(prompts, params)
    finished = wrong = 0
    for at, (text, (draft, name)) in enumerate(schemas.items()):
        judge = getattr(jsonschema, f"{DRAFTS[draft]}Validator")(exact(text))
        for out in outs[at * each : (at + 1) * each]:
            if out.finish_reason == "stop":
                finished += 1
                problems = [one.message for one in judge.iter_errors(exact(out.text))]
                wrong += bool(problems)
                if problems:
                    print(f"{name}\n  {text}\n  {out.text!r}: {problems[0]}")
    print(f"{len(schemas)} schemas, {len(outs)} answers, {finished} finished, {wrong} wrong")
    assert len(outs) >= ANSWERS
    assert finished > len(outs) // 4  # many schemas allow texts of any length, which the limit ends
    assert wrong == 0
