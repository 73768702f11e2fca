"""A model on actors of Ray answers as on one device, and says what went wrong."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ferrum_jax
from ferrum_jax import LLM
from tests import tiny
from tests.generate.test_request import letters

pytest.importorskip("ray", reason="needs the extra `ray`")
ROOT = Path(ferrum_jax.__file__).parents[1]


@pytest.mark.reference
def test_actors_answer_as_one_process(tmp_path: Path):
    from tests.integrations.ray_job import PROMPTS, SETTINGS, WANTED

    path = tiny.write_folder(tmp_path / "model", tiny.CONFIGS["llama31"])
    letters().backend.save(str(path / "tokenizer.json"))
    command = [sys.executable, "-m", "tests.integrations.ray_job", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    with LLM(path, progress=False, **SETTINGS) as one:
        wanted = [output.token_ids for output in one.generate(PROMPTS, WANTED)]
        assert found["tokens"] == found["one process"] == wanted
        np.testing.assert_allclose(found["scores"], one.score([PROMPTS[0]], [[9, 11]])[0].logprobs, rtol=1e-4)
    assert found["nowhere"].startswith("NotFoundError: ")
    assert "the cluster has not placed 2 processes with {'CPU': 2} each within 2 s" in found["crowded"]
    assert found["no mesh"] == "ConfigError: mesh is None, expected devices along expert or model"
    assert found["no cluster"] == "ConfigError: no Ray cluster is connected: call ray.init first"
    assert found["wrong resources"].startswith("ConfigError: resources are {'CPU': -1}")
    assert found["wrong environment"].startswith("ConfigError: environment is {'A': 1}")
    assert not found["started again"]
    assert found["wrong"].startswith("RequestValidationError: ")
    assert found["closed"] == "this LLM is closed"
    assert found["killed"].startswith("DeviceError: ")
    assert "process 1 of 2" in found["killed"]
    assert found["gone"].startswith("DeviceError: a process of the model is gone")
