"""Parameters between Hugging Face names and the trees of other libraries."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import ConfigError, InvalidParameterError, UnsupportedError
from ferrum_jax.models import forward, quantise
from ferrum_jax.models.layout import FUSED, SCANNED, lay_out
from ferrum_jax.models.specs import ParamTree, named_leaves
from ferrum_jax.weights.foreign import Rule, from_hf_names, from_tree, to_hf_names, to_tree
from ferrum_jax.weights.name_tables import maxtext_rules, tunix_rules
from tests import tiny

TUNIX = ("llama3", "llama32_tied", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3")
MAXTEXT = ("llama3", "mistral", "qwen3")
LLAMA = tiny.model_config("llama3")


def params_of(name: str) -> ParamTree:
    return tiny.tiny_params(tiny.CONFIGS[name])


_LAYER = r"model\.layers\.(?P<L>\d+)\."
RULES = [  # of a model that has q, k and v in one product, gate and up in another, and all layers stacked in front
    Rule(r"model\.norm\.weight", "norm", "D -> D"),
    Rule(r"model\.embed_tokens\.weight", "ends", "0/2 V D -> V D"),
    Rule(r"lm_head\.weight", "ends", "1/2 V D -> V D"),
    Rule(_LAYER + r"self_attn\.q_proj\.weight", "h.qkv", "L D [*(N H) (K H) (K H)] -> (N H) D"),
    Rule(_LAYER + r"self_attn\.k_proj\.weight", "h.qkv", "L D [(N H) *(K H) (K H)] -> (K H) D"),
    Rule(_LAYER + r"self_attn\.v_proj\.weight", "h.qkv", "L D [(N H) (K H) *(K H)] -> (K H) D"),
    Rule(_LAYER + r"self_attn\.o_proj\.weight", "h.o", "L (N H) D -> D (N H)"),
    Rule(_LAYER + r"mlp\.gate_proj\.weight", "h.wi", "L 0/2 F D -> F D"),
    Rule(_LAYER + r"mlp\.up_proj\.weight", "h.wi", "L 1/2 F D -> F D", 0.5),
    Rule(_LAYER + r"mlp\.down_proj\.weight", "h.wo", "L D F -> D F"),
    Rule(_LAYER + r"(\w+_layernorm)\.weight", r"norms.\2", "L D -> D"),
]


@pytest.mark.parametrize("name", TUNIX)
def test_there_and_back_is_the_same_for_every_family_of_tunix(name: str):
    cfg, params = tiny.model_config(name), params_of(name)
    there = to_tree(params, cfg, tunix_rules(cfg))
    tiny.assert_same_tree(from_tree(there, cfg, tunix_rules(cfg)), params)


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("name", MAXTEXT)
def test_there_and_back_is_the_same_for_maxtext(name: str, scanned: bool):
    cfg, params = tiny.model_config(name), params_of(name)
    rules = maxtext_rules(cfg, scanned=scanned)
    found = from_tree(to_tree(params, cfg, rules), cfg, rules)
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(leaf, wanted, rtol=3e-7)  # a query is divided by a root and multiplied again


def test_maxtext_stacks_layers_along_axis_1_and_has_rotated_pairs_side_by_side():
    params = params_of("llama3")
    layers = to_tree(params, LLAMA, maxtext_rules(LLAMA))["params"]["decoder"]["layers"]
    count, width, heads, size = LLAMA.num_hidden_layers, LLAMA.hidden_size, LLAMA.num_attention_heads, LLAMA.head_dim
    query = layers["self_attention"]["query"]["kernel"]
    assert query.shape == (width, count, heads, size)
    assert layers["self_attention"]["out"]["kernel"].shape == (heads, count, size, width)
    assert layers["pre_self_attention_layer_norm"]["scale"].shape == (width, count)
    ours = params["model"]["layers"][1]["self_attn"]["q_proj"]["weight"].reshape(heads, size, width)
    evens_then_odds = np.concatenate([query[:, 1, :, ::2], query[:, 1, :, 1::2]], axis=-1)  # [D, N, H]
    np.testing.assert_allclose(evens_then_odds.transpose(1, 2, 0), ours / size**0.5, rtol=3e-7)


def test_a_table_of_the_users_own_splits_and_joins_products():
    params = params_of("llama3")
    there = to_tree(params, LLAMA, RULES)
    heads, size = LLAMA.num_attention_heads + 2 * LLAMA.num_key_value_heads, LLAMA.head_dim
    assert there["h"]["qkv"].shape == (LLAMA.num_hidden_layers, LLAMA.hidden_size, heads * size)
    tiny.assert_same_tree(from_tree(there, LLAMA, RULES), params)
    layer = params["model"]["layers"][2]
    joined = jnp.concatenate([layer["self_attn"][f"{part}_proj"]["weight"] for part in "qkv"])
    np.testing.assert_array_equal(there["h"]["qkv"][2], joined.T)
    np.testing.assert_array_equal(there["h"]["wi"][2, 1], layer["mlp"]["up_proj"]["weight"] * 2)  # scale 0.5


def test_a_module_named_value_keeps_its_name():
    @partial(jax.tree_util.register_dataclass, data_fields=["query", "value"], meta_fields=[])
    @dataclass
    class Attention:
        query: Any
        value: Any

    tree = Attention({"w": nnx.Param(jnp.ones(1))}, {"w": nnx.Param(jnp.zeros(1))})
    assert {name: float(leaf[0]) for name, leaf in named_leaves(tree).items()} == {"query.w": 1.0, "value.w": 0.0}
    assert list(named_leaves(nnx.state(nnx.Dict(value=nnx.Param(jnp.ones(1)))))) == ["value"]


def test_a_product_that_the_checkpoint_has_fused_comes_from_several_arrays():
    cfg, params = tiny.model_config("phi3"), params_of("phi3")
    layer = r"model\.layers\.(\d+)\."
    parts = ("*(N H) (K H) (K H)", "(N H) *(K H) (K H)", "(N H) (K H) *(K H)")
    rules = [
        Rule(r"model\.embed_tokens\.weight", "e", "V D -> V D"),
        Rule(r"model\.norm\.weight", "n", "D -> D"),
        Rule(r"lm_head\.weight", "head", "D V -> V D"),
        *(
            Rule(layer + r"self_attn\.qkv_proj\.weight", rf"\1.{name}", f"D {heads} H -> [{part}] D")
            for name, heads, part in zip("qkv", "NKK", parts, strict=True)
        ),
        Rule(layer + r"self_attn\.o_proj\.weight", r"\1.o", "I O -> O I"),
        Rule(layer + r"mlp\.(\w+)\.weight", r"\1.\2", "I O -> O I"),
        Rule(layer + r"(\w+_layernorm)\.weight", r"\1.\2", "D -> D"),
    ]
    there = to_tree(params, cfg, rules)
    assert there["0"]["k"].shape == (cfg.hidden_size, cfg.num_key_value_heads, cfg.head_dim)
    tiny.assert_same_tree(from_tree(there, cfg, rules), params)


def test_an_nnx_state_a_flat_dict_and_nested_dicts_are_the_same():
    params = params_of("llama3")
    nested = to_tree(params, LLAMA, tunix_rules(LLAMA))
    flat = named_leaves(nested)
    tuples = {tuple(name.split(".")): leaf for name, leaf in flat.items()}
    numbered = {tuple(int(key) if key.isdigit() else key for key in path): leaf for path, leaf in tuples.items()}
    state = nnx.from_flat_state([(path, nnx.Param(leaf)) for path, leaf in sorted(numbered.items(), key=str)])
    for tree in (flat, tuples, state):
        tiny.assert_same_tree(from_tree(tree, LLAMA, tunix_rules(LLAMA)), params)
        back = to_tree(jax.tree.map(lambda x: x + 1, params), LLAMA, tunix_rules(LLAMA), like=tree)
        assert jax.tree.structure(back) == jax.tree.structure(tree)
        jax.tree.map(lambda found, given: np.testing.assert_array_equal(found, given + 1), back, tree)


@pytest.mark.parametrize("layout", [FUSED, SCANNED])
def test_parameters_of_any_layout_are_converted(layout: str):
    params = params_of("llama3")
    wanted = to_tree(params, LLAMA, tunix_rules(LLAMA))
    found = to_tree(lay_out(params, LLAMA, layout), LLAMA, tunix_rules(LLAMA))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_conversion_is_one_program_and_differentiable():
    params = params_of("llama3")
    there = to_tree(params, LLAMA, RULES)
    with jax.transfer_guard("disallow"):
        found = jax.jit(lambda tree: from_tree(tree, LLAMA, RULES))(there)
    tiny.assert_same_tree(found, params)
    total = jax.grad(lambda tree: sum(leaf.sum() for leaf in jax.tree.leaves(from_tree(tree, LLAMA, RULES))))(there)
    np.testing.assert_array_equal(total["h"]["wi"][:, 1], np.full_like(total["h"]["wi"][:, 1], 0.5))


def test_quantised_parameters_are_refused():
    kept = quantise(params_of("llama3"), LLAMA, "int8")
    for convert in (lambda: to_tree(kept, LLAMA, tunix_rules(LLAMA)), lambda: to_hf_names(kept, LLAMA)):
        with pytest.raises(InvalidParameterError, match=r"are quantised, .* the first: models\.dequantise"):
            convert()


def test_all_that_is_wrong_with_a_tree_is_in_one_message():
    tree = to_tree(params_of("llama3"), LLAMA, tunix_rules(LLAMA))
    del tree["layers"]["1"]["attn"]["q_proj"]
    tree["layers"]["2"]["mlp"]["up_proj"]["kernel"] = jnp.zeros((3, 4))
    tree["dropout"] = jnp.zeros(2)
    tree["layers"]["0"]["input_layernorm"]["w"] = jnp.ones(LLAMA.hidden_size, jnp.int32)
    with pytest.raises(InvalidParameterError) as caught:
        from_tree(tree, LLAMA, tunix_rules(LLAMA))
    assert str(caught.value) == (
        "this is not the tree of this llama: layers.1.attn.q_proj.w is missing; "
        "layers.0.input_layernorm.w has shape [48] of int32 (not floating-point), expected [48]; "
        "layers.2.mlp.up_proj.kernel has shape [3, 4], expected [48, 72]; dropout is unknown"
    )
    with pytest.raises(InvalidParameterError, match="this tree has other leaves: layers"):
        to_tree(params_of("llama3"), LLAMA, tunix_rules(LLAMA), like=tree)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (RULES[1:], "the rules do not say where all of model.norm.weight is"),
        (
            [
                Rule(r".*\.norm\..*", "a", "A -> [*A=4 B=44]"),
                Rule(r".*\.norm\..*", "b", "B -> [A=8 *B=40]"),
                *RULES[1:],
            ],
            "the rules do not say where all of model.norm.weight is",
        ),
        ([Rule(".*", "x", "D F")], "expected a text such as 'D F -> F D'"),
        ([Rule(".*norm.*", "x", "D 1 -> D")], "'1' is no axis"),
        ([Rule(".*norm.*", "x", "D -> D F")], "has 1 axes, the rule 2"),
        ([Rule(".*norm.*", "x", "D F -> D")], "nothing says the size or index of 'F'"),
        ([Rule(".*q_proj.*", "x", "D N -> (N H) D")], "its sides have different axes"),
        ([Rule(".*q_proj.*", "x", "D K H -> (K H) D")], "its axes say"),
        ([Rule(".*q_proj.*", "x", "D [(N H) (K H)] -> (N H) D")], "has a star"),
        ([Rule("(norm", "x", "D -> D")], "rule '(norm': its name is no regular expression: missing )"),
        ([Rule(".*norm.*", r"x.\1", "D -> D")], r"its path 'x.\\1' cannot be filled in: invalid group reference"),
        ([Rule(".*norm.*", r"x.\g<Z>", "D -> D")], r"its path 'x.\\g<Z>' cannot be filled in: unknown group name"),
        ([Rule(".*norm.*", "x", "D -> D", 0.0)], "its scale is 0.0, expected a finite number other than 0"),
        ([Rule(".*norm.*", "x", "D -> D", float("nan"))], "its scale is nan"),
        ([Rule(".*norm.*", "x", "D -> D", 10**400)], "its scale is 1000"),
        ([Rule(".*norm.*", "x", "D -> D", "2")], "its scale is '2'"),  # pyright: ignore[reportArgumentType]
        ([Rule(".*norm.*", "x", "2/2 D -> D")], "'2/2' is index 2 of an axis of 2"),
        (
            [*RULES[:-1], Rule(_LAYER + r"(\w+_layernorm)\.weight", r"norms.\2", "L=2 D -> D")],
            "model.layers.2.input_layernorm.weight would be index 2 of L, which has 2",
        ),
        *(
            ([Rule(".*norm.*", "x", axes)], f"brackets do not match, or a star marks nothing, in {axes!r}")
            for axes in (
                "(L D -> D]",
                "L (F D -> D F",
                "L F D] -> D F)",
                "D [(N H) *(K H] -> D",
                "D -> [*(D D]",
                "((N H) D -> D",
                "D ((N H) -> (N H) D",
                "D [((N H) *(K H)] -> D",
                "D -> [(D D) **D]",
            )
        ),
        (RULES[0], "expected a list of Rule"),
        (None, "rules are None, expected a list of Rule"),
        ([("norm", "x", "D -> D")], "('norm', 'x', 'D -> D') is no Rule"),
        ([Rule(".*norm.*", "x", None)], "None is no text"),  # pyright: ignore[reportArgumentType]
        ([Rule(".*norm.*", None, "D -> D")], "None is no text"),  # pyright: ignore[reportArgumentType]
        ([Rule(None, "x", "D -> D")], "None is no text"),  # pyright: ignore[reportArgumentType]
        (
            [Rule(r".*(q|k)_proj\.weight", "h.x", "D I -> I D"), *RULES],
            "put model.layers.0.self_attn.k_proj.weight and model.layers.0.self_attn.q_proj.weight into one place, h.x",
        ),
        (
            [Rule(r"model\.norm\.weight", "h.o.norm", "D -> D"), *RULES],
            "put model.layers.0.self_attn.o_proj.weight at h.o and model.norm.weight below it, at h.o.norm",
        ),
    ],
)
def test_what_is_wrong_with_a_rule_is_said(rules: list[Rule], message: str):
    with pytest.raises(ConfigError) as caught:
        to_tree(params_of("llama3"), LLAMA, rules)
    assert message in str(caught.value)


def test_rules_that_leave_out_a_part_of_a_leaf_cannot_write_it():
    rules = [rule for rule in RULES if rule.path != "ends"] + [
        Rule(r"model\.embed_tokens\.weight", "ends", "0/3 V D -> V D"),
        Rule(r"lm_head\.weight", "ends", "1/3 V D -> V D"),
    ]
    with pytest.raises(ConfigError, match="the rules leave out a part of ends"):
        to_tree(params_of("llama3"), LLAMA, rules)


def test_families_without_a_table_are_refused():
    for table in (tunix_rules, maxtext_rules):
        with pytest.raises(UnsupportedError, match="model_type 'deepseek_v3'"):
            table(tiny.model_config("deepseek3"))


@pytest.mark.parametrize("name", ["llama32_tied", "mixtral", "qwen2_moe", "gpt_oss", "deepseek3", "phi3"])
def test_tensors_by_their_hugging_face_names(name: str):
    cfg: ModelConfig = tiny.model_config(name)
    tensors: dict[str, Any] = {key: jnp.asarray(leaf) for key, leaf in tiny.tensors(tiny.CONFIGS[name]).items()}
    params = params_of(name)
    tiny.assert_same_tree(jax.jit(lambda flat: from_hf_names(flat, cfg))(tensors), params)
    back = to_hf_names(params, cfg)
    assert back.keys() == tensors.keys()
    for key, leaf in tensors.items():
        np.testing.assert_array_equal(back[key], leaf, err_msg=key)
    whole = named_leaves(params)
    if name == "mixtral":  # experts that are whole already
        tiny.assert_same_tree(from_hf_names(whole, cfg), params)


def test_all_that_is_wrong_with_named_tensors_is_in_one_message():
    tensors: dict[str, Any] = dict(tiny.tensors(tiny.CONFIGS["llama3"]))
    tensors["model.norm.weight"] = tensors["model.norm.weight"][1:]
    tensors["extra"] = tensors.pop("lm_head.weight")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = tensors["extra"]
    with pytest.raises(InvalidParameterError) as caught:
        from_hf_names(tensors, LLAMA)
    assert str(caught.value) == (
        "these are not the tensors of this llama: lm_head.weight is missing; "
        "model.norm.weight has shape [47], expected [48]; extra is unknown"
    )
    whole: dict[str, Any] = dict(tiny.tensors(tiny.CONFIGS["llama3"]))
    for leaf, found in (
        (np.ones(48, int), r"\[48\] of int64"),
        ([1.0] * 48, r"\[48\] of list"),
        (None, r"\[\] of NoneType"),
    ):
        with pytest.raises(
            InvalidParameterError,
            match=rf"model\.norm\.weight has shape {found} \(not floating-point\), expected \[48\]",
        ):
            from_hf_names(whole | {"model.norm.weight": leaf}, LLAMA)


@pytest.mark.parametrize("given", [[jnp.zeros(3)], {("norm",): jnp.zeros(3)}, None])
def test_tensors_without_names_are_refused(given: Any):
    with pytest.raises(InvalidParameterError, match=f"flat is a {type(given).__name__}, expected a dict whose keys"):
        from_hf_names(given, LLAMA)


def test_a_head_that_differs_from_the_embeddings_it_is_said_to_be_is_refused():
    cfg = tiny.model_config("llama32_tied")
    flat = to_hf_names(params_of("llama32_tied"), cfg)
    table = flat["model.embed_tokens.weight"]
    tiny.assert_same_tree(from_hf_names(flat | {"lm_head.weight": np.asarray(table)}, cfg), params_of("llama32_tied"))
    with pytest.raises(InvalidParameterError, match=r"lm_head\.weight differs .* tie_word_embeddings=False"):
        from_hf_names(flat | {"lm_head.weight": table + 1}, cfg)


def test_parameters_of_another_depth_are_refused():
    params = params_of("llama3")
    shallow = params | {"model": params["model"] | {"layers": params["model"]["layers"][:1]}}
    for convert in (
        lambda: to_hf_names(shallow, LLAMA),
        lambda: to_tree(shallow, LLAMA, RULES),
        lambda: lay_out(shallow, LLAMA, FUSED),
        lambda: forward(shallow, jnp.ones((1, 2), jnp.int32), LLAMA),
    ):
        with pytest.raises(InvalidParameterError, match=r"parameters of this llama: model\.layers\.1.* missing"):
            convert()


def test_tensors_of_pytorch_are_refused_with_what_to_give():
    class Tensor:
        shape = (48,)

    Tensor.__module__ = "torch"
    with pytest.raises(InvalidParameterError, match=r"model.norm.weight is a torch.Tensor: give arrays, jnp.asarray"):
        from_hf_names({"model.norm.weight": Tensor()}, LLAMA)
    with pytest.raises(InvalidParameterError, match=r"norm is a torch.Tensor: give arrays"):
        from_tree({"norm": Tensor()}, LLAMA, RULES)


def test_the_first_rule_for_a_parameter_counts_and_a_last_one_may_match_all():
    params = params_of("llama3")
    tiny.assert_same_tree(
        to_tree(params, LLAMA, [*RULES, Rule(r"(.*)", r"rest.\1", "S -> S")]), to_tree(params, LLAMA, RULES)
    )
