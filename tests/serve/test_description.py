"""What `/openapi.json` describes is what the server takes: cases that schemathesis makes end in no 5xx."""

import os
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from ferrum_jax.serve.server import Server
from tests.long import SEED

SLOW: Any = list(HealthCheck)
FEW, MANY = 5, int(os.environ.get("CASES", "1000"))  # cases for each endpoint


def run_cases(server: Server, count: int, chosen: int) -> dict[int, int]:
    """Sends so many cases to each endpoint, within and without what is described; returns how often what came back."""
    import schemathesis  # takes seconds

    schema: Any = schemathesis.openapi.from_dict(httpx.get(f"{server.url}/openapi.json", trust_env=False).json())
    statuses: dict[int, int] = {}
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
        for operation in schema.get_all_operations():
            wanted: Any = operation.ok()
            modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
            strategies = [wanted.as_strategy(generation_mode=mode) for mode in modes[: 2 if wanted.body else 1]]

            @seed(chosen)
            @settings(max_examples=count, deadline=None, database=None, suppress_health_check=SLOW,
                      phases=[Phase.generate])  # fmt: skip
            @given(case=st.one_of(strategies))
            def check(case: schemathesis.Case) -> None:
                more = case.as_transport_kwargs()
                sent = {
                    name: more[name] for name in ("json", "data", "headers", "params") if more.get(name) is not None
                }
                if isinstance(sent.get("data"), (bytes, str)):
                    sent["content"] = sent.pop("data")
                found = http.request(case.method, case.path, **sent)
                statuses[found.status_code] = statuses.get(found.status_code, 0) + 1
                assert found.status_code < 500, (case.method, case.path, sent, found.text)
                if found.status_code >= 400:
                    assert set(found.json()["error"]) == {"message", "type", "param", "code"}

            check()
    return statuses


def test_described_cases_end_in_no_server_error(server: Server):
    assert 200 in run_cases(server, FEW, 7)


@pytest.mark.slow
def test_many_described_cases_end_in_no_server_error(server: Server):
    print(f"SEED={SEED}")
    print(run_cases(server, MANY, SEED))
