"""Transformers takes the weights of the families it is set up for, and refuses the others before it allocates them."""

from typing import Any

import numpy as np
import pytest

from bench import models
from bench.kernels import CHANGES, SMOKE
from bench.kernels import TINY as NARROW
from bench.models import Subject
from ferrum_jax.config import EngineConfig, ModelConfig
from ferrum_jax.planning.subject import CONFIGURATIONS

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]

pytestmark = pytest.mark.reference


def _subject(name: str) -> Subject:
    """A model of a known shape, made small."""
    cfg = ModelConfig.from_hf(CONFIGURATIONS[name] | CHANGES[name] | NARROW | SMOKE[name])
    return models.random(name, cfg, "float32")


def test_experts_are_fused_as_transformers_has_them():
    from bench import transformers_peer

    subject = _subject("qwen3-30b-a3b")
    theirs = transformers_peer.TransformersPeer(subject, "cpu").prefill(PROMPT)["dynamic"].run()
    with models.run(subject, EngineConfig(max_seqs=1, kv_capacity=16)) as runner:
        runner.warmup(progress=False)
        ours = runner.prefill("0", PROMPT)
    np.testing.assert_allclose(theirs[0], ours, atol=1e-4)


def test_a_family_of_other_names_is_refused_before_its_weights_are_allocated(monkeypatch: pytest.MonkeyPatch):
    import torch

    from bench import transformers_peer

    devices, make = [], transformers_peer.AutoModelForCausalLM.from_config

    def make_and_note(*args: Any, **named: Any) -> Any:
        devices.append(torch.get_default_device().type)
        return make(*args, **named)

    monkeypatch.setattr(transformers_peer.AutoModelForCausalLM, "from_config", make_and_note)
    with pytest.raises(NotImplementedError, match=r"lite: \d+ parameters of transformers' deepseek_v2 differ"):
        transformers_peer.TransformersPeer(_subject("deepseek-v2-lite"), "cpu")
    assert devices == ["meta"]
