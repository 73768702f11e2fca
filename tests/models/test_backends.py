"""Which backend of attention a model gets, and what is said where it cannot have the one it asked for."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ferrum_jax.config import ATTENTIONS, EngineConfig
from ferrum_jax.contract.errors import ConfigError, UnsupportedError
from ferrum_jax.executor import plan_engine
from ferrum_jax.executor.sizing import plan_beside
from ferrum_jax.models.backends import choose_attention, kv_layout, settle_attention
from ferrum_jax.ops import native
from tests import tiny
from tests.executor.conftest import CFG

WIDE = replace(CFG, head_dim=128, num_attention_heads=8, num_key_value_heads=4)


def choose(asked: str | None, platform: str, dtype: str = "bfloat16", cfg: Any = WIDE, **changes: Any) -> str:
    given = {"dtype": dtype, "kv_dtype": dtype, "block_size": 128} | changes
    return choose_attention(asked, cfg, platform=platform, **given)


@pytest.mark.parametrize(
    ("platform", "dtype", "own"),
    [
        ("cpu", "float32", "cpu" if native.instruction_set() else "xla"),
        ("cpu", "bfloat16", "xla"),
        ("gpu", "bfloat16", "triton"),
        ("gpu", "float16", "triton"),
        ("gpu", "float32", "triton"),
        ("tpu", "bfloat16", "tpu"),
        ("tpu", "float32", "xla"),  # the kernel's products take bfloat16
    ],
)
def test_each_platform_has_its_own_backend(platform: str, dtype: str, own: str):
    assert choose(None, platform, dtype) == own


def test_a_model_that_the_platforms_own_cannot_serve_gets_xla():
    assert choose(None, "gpu", cfg=CFG) == "xla"  # heads 10 wide
    assert choose(None, "tpu", cfg=replace(WIDE, head_dim=64)) == "xla"
    assert choose(None, "tpu", cfg=replace(WIDE, attn_logit_softcapping=50.0)) == "xla"
    assert choose(None, "tpu", cfg=replace(WIDE, num_attention_heads=6, num_key_value_heads=3)) == "xla"
    assert choose(None, "gpu", cfg=replace(WIDE, attn_logit_softcapping=50.0, attention_sinks=True)) == "triton"


@pytest.mark.parametrize(("rank", "rotated", "own"), [(512, 64, "triton"), (256, 32, "triton"), (6, 4, "xla")])
def test_latents_have_a_kernel_on_a_gpu(rank: int, rotated: int, own: str):
    model = tiny.model_config("deepseek2")
    assert model.latent is not None
    cfg = replace(model, latent=replace(model.latent, kv_lora_rank=rank, qk_rope_head_dim=rotated))
    assert choose(None, "gpu", cfg=cfg) == own
    assert kv_layout(own, cfg) == {"triton": "latent_rows", "xla": "latent"}[own]
    assert choose(None, "tpu", cfg=cfg) == "xla"
    if own == "xla":
        with pytest.raises(UnsupportedError, match="a latent's width is 10, supported are multiples of 16 up to 640"):
            choose("triton", "gpu", cfg=cfg)


@pytest.mark.parametrize(("asked", "platform"), [("triton", "cpu"), ("tpu", "gpu"), ("triton", "tpu")])
def test_a_backend_of_another_platform_is_a_config_error(asked: str, platform: str):
    with pytest.raises(ConfigError, match=rf"'{asked}' runs on [gt]pu, this device is a {platform}"):
        choose(asked, platform)


@pytest.mark.parametrize(
    ("asked", "platform", "changes", "message"),
    [
        ("triton", "gpu", {"kv_dtype": "float8_e4m3fn"}, "kv_dtype is float8_e4m3fn, supported are 16 and 32 bits"),
        ("tpu", "tpu", {"kv_dtype": "float16"}, "kv_dtype is float16 and dtype is bfloat16"),
        ("tpu", "tpu", {"dtype": "float16"}, "dtype is float16, supported is bfloat16"),
        ("tpu", "tpu", {"block_size": 24}, "block_size is 24, supported are multiples of 16"),
        ("tpu", "tpu", {"cfg": replace(WIDE, head_dim=64)}, "head_dim is 64, supported are multiples of 128"),
        ("triton", "gpu", {"cfg": CFG}, "head_dim is 10, supported are multiples of 16 up to 256"),
        ("triton", "gpu", {"cfg": replace(WIDE, head_dim=512)}, "head_dim is 512"),
        ("tpu", "tpu", {"cfg": replace(WIDE, attention_sinks=True)}, "the model has attention sinks, it has none"),
        ("tpu", "tpu", {"cfg": replace(WIDE, attn_logit_softcapping=50.0)}, "it has no soft cap of scores"),
        (
            "tpu",
            "tpu",
            {"cfg": replace(WIDE, num_attention_heads=6, num_key_value_heads=3)},
            "num_key_value_heads is 3, supported are 1, 2, 4 and multiples of 8",
        ),
    ],
)
def test_what_a_backend_cannot_serve_is_unsupported(asked: str, platform: str, changes: dict[str, Any], message: str):
    with pytest.raises(UnsupportedError, match=message):
        choose(asked, platform, **changes)


def test_a_jax_without_triton_leaves_xla(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert choose(None, "gpu") == "xla"
    with pytest.raises(UnsupportedError, match="has no Pallas for Triton"):
        choose("triton", "gpu")


def test_xla_serves_everything_everywhere():
    for platform in ("cpu", "gpu", "tpu"):
        assert choose("xla", platform, "float16", cfg=CFG, block_size=7) == "xla"


def test_a_plan_has_the_backend_and_the_layout_it_reads():
    for platform, asked, layout in (
        ("cpu", None, "products"),
        ("gpu", "triton", "positions"),
        ("tpu", None, "interleaved"),
    ):
        plan = plan_engine(EngineConfig(attention=asked), WIDE, platform=platform, free_bytes=10**12)
        assert plan.cache.layout == layout == kv_layout(plan.cache.attention, WIDE)
    with pytest.raises(ConfigError, match="runs on gpu"):
        plan_engine(EngineConfig(attention="triton"), WIDE, platform="cpu", free_bytes=10**12)


@pytest.mark.parametrize("wrong", ["flash", "", 1, True, ["xla"]])
def test_an_unknown_backend_is_refused(wrong: Any):
    with pytest.raises(ConfigError, match=r"attention is .* expected xla, cpu, triton or tpu"):
        EngineConfig(attention=wrong)


def test_the_environment_names_a_backend():
    for name in ATTENTIONS:
        assert EngineConfig.from_environment({"FERRUM_ATTENTION": f" {name.upper()} "}).attention == name
    with pytest.raises(ConfigError, match="FERRUM_ATTENTION='flash'"):
        EngineConfig.from_environment({"FERRUM_ATTENTION": "flash"})


def test_one_loop_over_layers_of_different_windows_is_xlas():
    alike = replace(WIDE, layer_windows=(9, 9))
    assert len(set(WIDE.layer_windows)) == 2
    assert choose(None, "gpu") == choose(None, "gpu", cfg=alike, layout="scanned") == "triton"
    assert choose(None, "gpu", layout="scanned") == "xla"
    with pytest.raises(UnsupportedError, match=r"different windows, which one loop .* attention 'xla' serves"):
        choose("triton", "gpu", layout="scanned")


def device(platform: str, **more: Any) -> Any:
    return SimpleNamespace(id=0, platform=platform, device_kind="any", memory_stats=dict, **more)


@pytest.mark.parametrize(
    ("given", "cfg", "place", "why"),
    [
        ({}, WIDE, device("gpu", compute_capability="9.0"), None),
        ({}, WIDE, device("gpu", compute_capability="gfx942"), None),
        ({}, WIDE, device("gpu", compute_capability="7.5"), "compute capability 7.5"),
        ({}, CFG, device("gpu"), "head_dim is 10"),
        ({"kv_dtype": "fp8"}, WIDE, device("gpu"), "kv_dtype is float8_e4m3fn"),
        ({"attention": "xla"}, CFG, device("gpu"), None),
        ({"attention": "triton"}, WIDE, device("gpu", compute_capability="7.5"), None),
        ({"dtype": "float32"}, WIDE, device("tpu"), "dtype is float32"),
        ({"dtype": "float16"}, CFG, device("cpu"), None),
    ],
)
def test_an_accelerator_that_falls_back_to_xla_says_so(
    given: dict[str, Any], cfg: Any, place: Any, why: str | None, caplog: pytest.LogCaptureFixture
):
    settings = EngineConfig(**given)
    found = settle_attention(settings, cfg, place, warn=True)
    if why is None:
        assert found == settings
        assert not caplog.records
        return
    assert found.attention == "xla"
    (record,) = caplog.records
    own = {"gpu": "triton", "tpu": "tpu"}[place.platform]
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"attention '{own}' cannot serve this: {why}")
    assert record.getMessage().endswith("XLA's code is used, which is many times slower")


def test_a_plan_beside_parameters_warns_once(caplog: pytest.LogCaptureFixture):
    placed: Any = SimpleNamespace(
        division=None, placement=SimpleNamespace(first=device("gpu", compute_capability="7.0"))
    )
    plan = plan_beside({}, EngineConfig(max_seqs=1), WIDE, placed=placed, free_bytes=10**12)
    assert plan.cache.attention == "xla"
    assert len(caplog.records) == 1
