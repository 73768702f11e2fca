"""Hidden states and attention weights that a forward returns, and vectors that steer it."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ferrum_jax
from ferrum_jax import models
from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import InvalidParameterError, UnsupportedError
from ferrum_jax.kvcache import state
from ferrum_jax.models import Batch, Rows
from ferrum_jax.models.layout import CHECKPOINT, SCANNED, lay_out
from ferrum_jax.ops import native
from ferrum_jax.ops.attention import attend, attend_dense, cached_keys
from tests.tiers import by_default
from tests.tiny import CONFIGS, model_config, prompt, tiny_params

NAMES = ("qwen3_window_biases", "gemma2")
OTHERS = (
    "phi3",
    "olmo2",
    "gemma",
    "mixtral",
    "qwen3_moe",
    "deepseek3",
    "gpt_oss",
)  # one of each other family
BOTH = list(itertools.product([CHECKPOINT, SCANNED], NAMES))
TOLERANCE = 2e-5  # float32 sums in another order
WIDTH = 48
capture = jax.jit(models.capture, static_argnames=("cfg", "hidden", "attention_weights"))
forward = jax.jit(models.forward, static_argnames="cfg")


def model(name: str):
    return tiny_params(CONFIGS[name]), model_config(name)


def tokens_of(name: str) -> jax.Array:
    return jnp.array(prompt(name)[:44]).reshape(2, -1)


def one_row(cfg: ModelConfig, tokens: list[int]):
    """An empty KV of two blocks of eight positions, and a batch of one sequence that wants all logits."""
    ids, none = jnp.array([tokens]), jnp.zeros(1, jnp.int32)
    rows = Rows(tokens=ids, lengths=none, counts=none + len(tokens), tables=jnp.array([[1, 0]]))
    kv = state.empty(models.cache_spec(cfg, num_blocks=2, block_size=8, dtype="float32"))
    return kv, Batch(groups=(rows,), logit_rows=jnp.arange(len(tokens)))


def test_the_names_cover_every_kind_of_decoder():
    covered = {models.family(model_config(name)) for name in (*NAMES, *OTHERS)}
    assert covered == {models.family(model_config(name)) for name in CONFIGS}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name"), by_default(BOTH, (SCANNED, "qwen3_window_biases")))
def test_captured_hidden_states_explain_the_logits(layout: str, name: str):
    params, cfg = model(name)
    params = lay_out(params, cfg, layout)
    tokens = tokens_of(name)
    every = range(cfg.num_hidden_layers + 1)
    expected = forward(params, tokens, cfg)
    logits, hidden, weights = capture(params, tokens, cfg, hidden=tuple(every), attention_weights=(2, 0))
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE)  # another program, whose sums XLA may order otherwise
    assert sorted(hidden) == list(every)
    assert hidden[0].shape == (2, tokens.shape[1], WIDTH)
    np.testing.assert_allclose(models.logits_of(params, hidden[cfg.num_hidden_layers], cfg), logits, atol=TOLERANCE)
    assert sorted(weights) == [0, 2]
    for layer, own in weights.items():
        assert own.shape == (2, 8, tokens.shape[1], tokens.shape[1])
        np.testing.assert_allclose(own.sum(axis=-1), 1.0, atol=1e-6)
        at = np.arange(tokens.shape[1])
        visible = at[None] <= at[:, None]
        if (window := cfg.layer_windows[layer]) is not None:
            visible &= at[None] > at[:, None] - window
        assert not np.asarray(own)[:, :, ~visible].any()
        assert (np.asarray(own)[:, :, visible] > 0).all()


@pytest.mark.parametrize("name", by_default(OTHERS, "olmo2"))
def test_every_family_returns_its_hidden_states_and_can_be_steered(name: str):
    params, cfg = model(name)
    tokens = tokens_of(name)
    last = cfg.num_hidden_layers
    vectors = jnp.zeros((last, WIDTH)).at[-1].set(jax.random.normal(jax.random.key(3), (WIDTH,)))
    logits, hidden, _ = capture(params, tokens, cfg, hidden=(0, last))
    np.testing.assert_allclose(models.logits_of(params, hidden[last], cfg), logits, atol=TOLERANCE)
    expected = models.logits_of(params, hidden[last] + vectors[-1], cfg)
    with pytest.raises(InvalidParameterError, match=r"x has shape .*, expected \[\.\.\., D\] of D = "):
        models.logits_of(params, hidden[last][..., 1:], cfg)
    assert models.logits_of(params, hidden[last][:, :0], cfg).shape == (*tokens.shape[:1], 0, cfg.vocab_size)
    np.testing.assert_allclose(forward(params, tokens, cfg, steering=vectors), expected, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(NAMES, "gemma2"))
def test_attention_mixes_values_by_the_captured_weights(name: str):
    """One value is set apart: what it adds to the output is its weight."""
    cfg = model_config(name)
    tokens = tokens_of(name)[:1]
    length = tokens.shape[1]
    q_like = jax.random.normal(jax.random.key(0), (1, length, cfg.num_attention_heads, cfg.head_dim))
    keys, values = jax.random.normal(jax.random.key(1), (2, length, cfg.num_key_value_heads, cfg.head_dim))
    spec = state.CacheSpec(
        num_layers=2, num_blocks=6, block_size=8, num_kv_heads=keys.shape[1], head_dim=cfg.head_dim, dtype="float32"
    )
    table = jnp.array([[4, 0, 2]])
    at = jnp.arange(length)
    kv = jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan, leaf.dtype), state.shapes(spec))
    kv = state.write(kv, 1, table[0, at // 8], at % 8, keys, values)
    rows = Rows(tokens=tokens[:, 9:], lengths=jnp.array([9]), counts=jnp.array([length - 10]), tables=table)
    how = {"scale": 0.4, "window": cfg.layer_windows[1], "softcap": cfg.attn_logit_softcapping}
    q, (k, v) = q_like[:, 9:], cached_keys(kv, 1, rows)
    out, scores, found = jax.jit(attend_dense, static_argnames=tuple(how))(q, k, v, rows, **how)
    np.testing.assert_allclose(jax.nn.softmax(scores[:, :, :-1], axis=-1), found[:, :, :-1], rtol=0, atol=TOLERANCE)
    assert found.shape == (1, cfg.num_attention_heads, length - 9, 24)
    assert not found[:, :, -1].any()  # padding
    group = cfg.num_attention_heads // cfg.num_key_value_heads
    mixed = jnp.einsum("BNTS,SNH->BTNH", found[..., :length], jnp.repeat(values, group, axis=1))
    attended = jax.jit(attend, static_argnames=tuple(how))(q_like[:, 9:], kv, 1, rows, **how)
    np.testing.assert_allclose(mixed, attended, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(out, attended, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name"), BOTH)
def test_steering_adds_to_what_a_layer_gives(layout: str, name: str):
    params, cfg = model(name)
    params = lay_out(params, cfg, layout)
    tokens = tokens_of(name)
    vectors = jax.random.normal(jax.random.key(3), (cfg.num_hidden_layers, WIDTH))
    _, plain, _ = capture(params, tokens, cfg, hidden=(0, 1, 2))
    logits, hidden, _ = capture(params, tokens, cfg, hidden=(0, 1, 2), steering=vectors.at[1:].set(0.0))
    np.testing.assert_array_equal(hidden[0], plain[0])
    np.testing.assert_allclose(hidden[1], plain[1] + vectors[0], atol=TOLERANCE)
    assert float(jnp.abs(hidden[2] - plain[2]).max()) > 0.1
    last = jnp.zeros_like(vectors).at[-1].set(vectors[-1])
    _, both, _ = capture(params, tokens, cfg, hidden=(3,))
    expected = models.logits_of(params, both[3] + vectors[-1], cfg)
    np.testing.assert_allclose(forward(params, tokens, cfg, steering=last), expected, atol=TOLERANCE)
    each = jnp.zeros((3, *tokens.shape, WIDTH)).at[:, 1, 5:].set(vectors[:, None])
    found = forward(params, tokens, cfg, steering=each)
    unsteered = forward(params, tokens, cfg)
    np.testing.assert_allclose(found[0], unsteered[0], atol=TOLERANCE)
    np.testing.assert_allclose(found[1, :5], unsteered[1, :5], atol=TOLERANCE)
    assert float(jnp.abs(found[1, 5:] - unsteered[1, 5:]).max()) > 0.1
    assert logits.shape == found.shape


@pytest.mark.slow
def test_a_new_vector_compiles_nothing_and_has_a_gradient(compiles: list[str]):
    params, cfg = model("mistral")
    tokens = tokens_of("mistral")
    run = jax.jit(lambda vectors: models.forward(params, tokens, cfg, steering=vectors).sum())
    slope = jax.jit(jax.grad(run))
    vectors = [jax.random.normal(jax.random.key(at), (3, WIDTH)) for at in range(3)]
    values = [run(vectors[0]), slope(vectors[0])]
    jax.block_until_ready(values)
    compiles.clear()
    for vector in vectors[1:]:
        jax.block_until_ready((run(vector), slope(vector)))
    assert compiles == []
    assert float(jnp.abs(values[1]).min()) > 0


@pytest.mark.slow
def test_generation_is_steered_by_an_argument_that_compiles_nothing(compiles: list[str]):
    params, cfg = model("mistral")
    tokens = tokens_of("mistral")[:1, :7]
    vectors = [jnp.zeros((3, WIDTH)), *jax.random.normal(jax.random.key(3), (2, 3, WIDTH))]
    run = jax.jit(partial(ferrum_jax.generate_fn, cfg=cfg, max_tokens=2))
    inputs = params, None, tokens, jnp.array([7]), jnp.zeros(1, jnp.uint32)
    expected = [jax.nn.log_softmax(forward(params, tokens, cfg, steering=vector)[0, -1]) for vector in vectors]
    run(*inputs, steering=vectors[0])
    compiles.clear()
    found = [jax.block_until_ready(run(*inputs, steering=vector)[0]) for vector in vectors]
    assert compiles == []
    for rollout, wanted in zip(found, expected, strict=True):
        assert int(rollout.token_ids[0, 0]) == int(wanted.argmax())
        np.testing.assert_allclose(rollout.logprobs[0, 0], wanted.max(), rtol=0, atol=TOLERANCE)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"hidden": [4]}, "hidden has the layer 4, expected 0 to 3"),
        ({"attention_weights": [3]}, "attention_weights has the layer 3, expected 0 to 2"),
        ({"hidden": [-1]}, "hidden has the layer -1"),
        ({"hidden": [True]}, "hidden has the layer True"),
        ({"hidden": 1}, "hidden is 1, expected layers"),
        (
            {"steering": jnp.zeros((2, WIDTH))},
            r"steering has shape \[2, 48\], expected .*: \[3, 48\] or \[3, 2, 22, 48\]",
        ),
        ({"steering": jnp.zeros(WIDTH)}, r"steering has shape \[48\]"),
        ({"steering": jnp.zeros((3, 22, 2, WIDTH))}, r"steering has shape \[3, 22, 2, 48\]"),
        ({"inputs_embeds": jnp.zeros((22, 2, WIDTH))}, r"inputs_embeds has shape \[22, 2, 48\], .*: \[2, 22, 48\]"),
        ({"inputs_embeds": jnp.zeros((2, WIDTH, 22))}, r"inputs_embeds has shape \[2, 48, 22\]"),
        ({"steering": jnp.zeros((3, WIDTH - 1))}, r"steering has shape \[3, 47\]"),
        ({"steering": "abc"}, "steering is no array"),
        ({"steering": [10**40]}, "steering is no array"),
        ({"steering": [[1.0], [1.0, 2.0]]}, "steering is no array"),
        (
            {"inputs_embeds": jnp.zeros((2, 22, WIDTH), int)},
            "inputs_embeds has numbers of int32",
        ),
    ],
)
def test_what_does_not_exist_cannot_be_captured_or_steered(asked: dict, message: str):
    params, cfg = model("mistral")
    with pytest.raises(InvalidParameterError, match=message):
        models.capture(params, tokens_of("mistral"), cfg, **asked)


@pytest.mark.usefixtures("unchecked")
def test_tokens_are_integers():
    params, cfg = model("mistral")
    wrongs: tuple[tuple[Any, str], ...] = (
        (jnp.array([[1.7]]), "tokens are float32, expected integers"),
        (np.array([[2**32 + 5, 2]]), "tokens have 4294967301, expected integers of 32 bits"),
        ([[2**32 + 5, 2]], "tokens have 4294967301, expected integers of 32 bits"),
        ([[1, 2], [3]], "tokens are no array"),
        ("text", "tokens are <U4, expected integers"),
    )
    for wrong, message in wrongs:
        with pytest.raises(InvalidParameterError, match=message):
            models.forward(params, wrong, cfg)  # pyright: ignore[reportArgumentType]
    token: Any = np.array([[5]])
    for own, message in (
        ({"targets": np.array([[2**32 + 1]])}, "targets have 4294967297"),
        ({"block": 2.5}, "block is 2.5, expected an integer of at least 1"),
    ):
        options: dict[str, Any] = {"targets": token} | own
        with pytest.raises(InvalidParameterError, match=message):
            models.log_probs(params, token, cfg, **options)
    with pytest.raises(InvalidParameterError, match="logits have -4294967296"):
        models.forward(params, token, cfg, logits=np.array([[-(2**32)]]))


@pytest.mark.usefixtures("unchecked")
def test_the_kernels_backend_is_refused_where_there_are_none(monkeypatch: pytest.MonkeyPatch):
    params, cfg = model("mistral")
    monkeypatch.setattr(native, "library", lambda: "they were not built")
    with pytest.raises(UnsupportedError, match="attention 'cpu' has no kernels: they were not built"):
        models.forward(params, jnp.array([[1]]), cfg, attention="cpu")
    with pytest.raises(UnsupportedError, match=r"attention 'tpu': head_dim is .*, supported are multiples of 128"):
        models.forward(params, jnp.array([[1]]), cfg, attention="tpu")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.skipif(native.instruction_set() is None, reason="no kernels")
def test_the_kernels_backend_is_refused_for_what_it_does_not_compute():
    params, cfg = model("mistral")
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    with pytest.raises(UnsupportedError, match="attention 'cpu': dtype is bfloat16, the kernels compute in float32"):
        models.forward(half, jnp.array([[1]]), cfg, attention="cpu")


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_lists_do_as_well_as_arrays():
    config = CONFIGS["mistral"] | {"num_hidden_layers": 1}
    params, cfg = tiny_params(config), ModelConfig.from_hf(config)
    vectors = jax.random.normal(jax.random.key(0), (1, WIDTH))
    expected = forward(params, jnp.array([[1, 2]]), cfg, steering=vectors)
    lists: dict[str, Any] = {"tokens": [[1, 2]], "steering": vectors.tolist()}
    np.testing.assert_allclose(jax.jit(lambda: models.forward(params, cfg=cfg, **lists))(), expected, atol=TOLERANCE)


@pytest.mark.slow
def test_a_steering_vector_is_added_in_float32_and_rounded_once():
    params, cfg = model("mistral")
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    tokens, wide = tokens_of("mistral"), jnp.full((3, WIDTH), 1.0 + 2.0**-9)
    _, plain, _ = models.capture(low, tokens, cfg, hidden=[1])  # one jit around it may leave out roundings
    _, found, _ = models.capture(low, tokens, cfg, hidden=[1], steering=wide)
    exact = plain[1].astype(jnp.float32) + wide[0]
    np.testing.assert_array_equal(found[1], exact.astype(jnp.bfloat16))
    assert not np.array_equal(found[1], plain[1] + wide[0].astype(jnp.bfloat16))


def test_a_forward_always_returns_three_things_and_captures_nothing_unasked():
    params, cfg = model("mistral")
    kv, batch = one_row(cfg, [1, 2, 3])
    logits, written, captured = jax.eval_shape(partial(models.family(cfg).forward, cfg=cfg), params, kv, batch)
    assert (logits.shape, captured) == ((3, 97), {})
    assert jax.tree.structure(written) == jax.tree.structure(kv)


@pytest.mark.slow
def test_each_group_of_a_batch_has_weights_of_its_own():
    params, cfg = model("mistral")
    spec = state.CacheSpec(
        num_layers=3, num_blocks=6, block_size=8, num_kv_heads=2, head_dim=cfg.head_dim, dtype="float32"
    )
    one = Rows(tokens=jnp.array([[7]]), lengths=jnp.array([0]), counts=jnp.array([1]), tables=jnp.array([[0, 1]]))
    other = Rows(
        tokens=jnp.array([[1, 2, 3]]), lengths=jnp.array([0]), counts=jnp.array([3]), tables=jnp.array([[2, 3]])
    )
    batch = Batch(groups=(one, other), logit_rows=jnp.arange(4))
    run = jax.jit(models.family(cfg).forward, static_argnames=("cfg", "capture"))
    points = models.Point("resid_post", 0), models.Point("pattern", 0)
    *_, found = run(params, state.empty(spec), batch, cfg, capture=points)
    assert [group.shape for group in found["pattern", 0]] == [(1, 8, 1, 16), (1, 8, 3, 16)]
    _, hidden, weights = capture(params, other.tokens, cfg, hidden=(1,), attention_weights=(0,))
    np.testing.assert_allclose(found["resid_post", 0][1:], hidden[1][0], atol=TOLERANCE)
    np.testing.assert_allclose(found["pattern", 0][1][..., :3], weights[0], atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "layer"), [(CHECKPOINT, "layer_1"), (SCANNED, "layer")])
def test_profiles_name_the_parts_of_a_layer(layout: str, layer: str):
    params, cfg = model("mistral")
    text = forward.lower(lay_out(params, cfg, layout), tokens_of("mistral"), cfg).as_text(debug_info=True)
    for part in (f"{layer}/attention/", f"{layer}/mlp/", "head/"):
        assert part in text
