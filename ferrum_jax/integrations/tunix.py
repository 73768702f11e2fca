"""Rollouts for tunix's trainers (extra `tunix`).

`ClusterConfig(rollout_engine=FerrumRollout, …)` is all that an `RLCluster` needs; for settings of the engine, pass
`functools.partial(FerrumRollout, max_seqs=64)`. Supported are tunix's Llama 3, Qwen 2, Qwen 3, Gemma 2 and Gemma 3,
full or with LoRA; log-probabilities are those of the trainer's own forward. tunix masks pad tokens everywhere, even
inside a prompt, and so does this engine. tunix counts padding into Gemma 2's window, so that the two agree only within
4,096 tokens. LoRA is served as an adapter beside the weights, as the trainer computes it, so that an update of LoRA
copies nothing else. It may adapt projections of attention, and of feed-forward blocks without routed experts.
"""

# pyright: reportMissingImports=false
import inspect
import itertools
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray
from tunix.rl.rollout import base_rollout

from ferrum_jax.config import EngineConfig, ModelConfig
from ferrum_jax.config.engine import MeshSizes
from ferrum_jax.contract.checks import check_no_problems, differences
from ferrum_jax.contract.errors import ConfigError, InvalidParameterError, UnsupportedError
from ferrum_jax.executor.from_params import from_params
from ferrum_jax.executor.weights import brought_to, check_same_shapes, served_shapes
from ferrum_jax.generate.llm import LLM
from ferrum_jax.generate.params import SamplingParams
from ferrum_jax.integrations.tunix_lora import LORA, adapter_of, lora_scales, split_lora
from ferrum_jax.models.backends import layout_for, obstacle_of_kernels
from ferrum_jax.models.layout import CHECKPOINT, FUSED, lay_out
from ferrum_jax.models.specs import NewParams, ParamTree, name_of
from ferrum_jax.weights.foreign import Rule, from_tree, plan
from ferrum_jax.weights.name_tables import tunix_rules

POSITIONS = 1 << 17  # longest sequence: tunix's configurations have no limit
_ADAPTER = "actor"


class FerrumRollout(base_rollout.BaseRollout):
    """Generates with its own engine, whose weights are updated from the trainer's."""

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: base_rollout.RolloutConfig | None = None,
        *,
        cfg: ModelConfig | None = None,
        rules: Sequence[Rule] | None = None,
        lora_scale: float | None = None,
        serving_mesh: MeshSizes = None,
        warmup: bool = True,
        engine: EngineConfig | None = None,
        **settings: Any,
    ):
        """Copies the actor's weights into an engine, and compiles the programs for its rollouts.

        Args:
            rollout_actor: a model of tunix, or any `nnx.Module` with `cfg` and `rules`.
            tokenizer: tunix's adapter of a tokenizer.
            mesh: the cluster's mesh; ignored, as weights are copied from any sharding.
            rollout_config: of training. It gives the longest prompt and answer (their sum or `kv_cache_size` is the
                longest sequence unless `kv_capacity` is given), the dtype, and the temperature of log-probabilities.
            cfg: the model's configuration; read from a model of tunix if None.
            rules: where the model has its parameters; tunix's if None.
            lora_scale: alpha / rank of LoRA; qwix's if None.
            serving_mesh: as `mesh` of `load`; None divides the model over `tensor_parallel_size` devices if that is
                given, else serves it on the first device that holds weights.
            warmup: compile all programs now; otherwise when they are first needed.
            engine: how to run the model.
            **settings: fields of `EngineConfig`, which override those of `engine`. `max_seqs` answers are generated at
                a time.

        Raises:
            UnsupportedError: the model is not supported, has LoRA elsewhere, or lies in host memory (`offload_to_cpu`).
            ConfigError: the scale of LoRA is unknown, settings contradict each other, or `rollout_config` has settings
                that this engine does not implement.
        """
        training: Any = rollout_config or base_rollout.RolloutConfig()
        serving_mesh = _mesh_asked(training, serving_mesh)
        self._tokenizer = tokenizer
        self._temperature, self._calls = training.temperature, itertools.count()
        self._gate = _Gate()
        self._cfg = cfg or config_of(rollout_actor)
        self._rules = tunix_rules(self._cfg) if rules is None else rules
        self._moves = plan(self._cfg, self._rules)
        given = _leaves(nnx.state(rollout_actor, nnx.Param))
        self._scales = lora_scales(rollout_actor, given, lora_scale)
        self._adapter = _ADAPTER if self._scales else None
        lora, given = split_lora(given)
        asked = EngineConfig(**settings).over(engine or EngineConfig())
        longest = training.max_prompt_length + training.max_tokens_to_generate
        capacity = max(longest, training.kv_cache_size)
        first = min({device for leaf in given.values() for device in leaf.devices()}, key=lambda one: one.id)
        found = asked.over_environment()
        self._serves_one = not (serving_mesh or found.mesh_sizes)
        dtype = jnp.dtype(training.data_type or next(iter(given.values())).dtype).name
        by_kernels = first.platform == "cpu" and obstacle_of_kernels(self._cfg, dtype) is None
        best = layout_for(self._cfg, found.attention or "cpu") if by_kernels and self._serves_one else FUSED
        asked = asked.over(EngineConfig(layout=FUSED if best == CHECKPOINT else best, kv_capacity=capacity))
        if lora:
            rank = max(leaf.shape[-1] for path, leaf in lora.items() if path.endswith(LORA[0]))
            asked = asked.over(EngineConfig(max_loras=1, max_lora_rank=rank))
        self._layout, self._served = asked.layout or FUSED, dtype
        self._device = first
        self._convert: Any = jax.jit(self._converted, donate_argnums=1, keep_unused=True)
        self._adapt: Any = jax.jit(self._adapted)
        adapter = self._placed(self._adapt, lora) if lora else None
        runner = from_params(self._placed(self._convert, given), self._cfg, mesh=serving_mesh, engine=asked)
        self.llm = LLM.from_model(runner)  # public: it can do more than tunix asks for
        try:
            if adapter is not None:
                runner.set_lora(_ADAPTER, adapter)
            if warmup:
                self.llm.warmup(progress=False)
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        rollout_config: base_rollout.RolloutConfig,
        **kwargs: Any,
    ) -> base_rollout.RolloutOutput:
        """Answers prompts under one version of the weights; successive equal prompts are prefilled once.

        Prompts are padded on the left to `max_prompt_length`, or to the next power of two if one is longer. An answer
        keeps the token that ended it; its text does not. The pad token is never sampled unless it ends answers.
        Log-probabilities, if asked for, are those of the actor at this temperature (greedy ones at 1), normalised over
        the whole vocabulary, pad token included, as tunix computes them; if the temperature is not 1, this may score
        the answers once more. With a seed, a series of calls is repeatable, and each call samples other numbers.
        Several threads may call it; their answers share steps.

        Raises:
            InvalidParameterError: there are no prompts, a prompt and its answer are longer than a sequence may be, an
                argument is not in tunix's protocol, or the dtype is not that of the served weights.
        """
        if kwargs:
            raise InvalidParameterError(f"{', '.join(sorted(kwargs))}: unknown arguments of generate")
        if rollout_config.data_type is not None and jnp.dtype(rollout_config.data_type) != self._served:
            given = jnp.dtype(rollout_config.data_type).name
            raise InvalidParameterError(f"data_type is {given}, these weights are served in {self._served}")
        if not len(prompts):
            raise InvalidParameterError("there are no prompts")
        ids = [self._encode(prompt) for prompt in prompts]
        read = [[token for token in own if token != self.pad_id()] for own in ids]
        most, limit = max(map(len, ids)), rollout_config.max_tokens_to_generate
        if most + limit > (capacity := self.llm.model.kv_capacity()):
            raise InvalidParameterError(
                f"a prompt has {most} tokens and its answer up to {limit}, a sequence {capacity}: set kv_cache_size"
            )
        ends = list(rollout_config.eos_tokens or [self.eos_id()])
        params = self._sampling(rollout_config, ends)
        groups = [[one] for one in read]
        if params["temperature"] > 0:
            groups = [list(group) for _, group in itertools.groupby(read)]
        draw = np.random.default_rng([*_seed(rollout_config.seed), next(self._calls)])
        seeds = draw.integers(1 << 32, size=len(groups)).tolist()
        each = [SamplingParams(**params, n=len(group), seed=seed) for group, seed in zip(groups, seeds, strict=True)]
        with self._gate.shared():
            outs = self.llm.generate([group[0] for group in groups], each, lora_request=self._adapter)
            padded, tokens = self._padded(ids, rollout_config), [np.asarray(out.token_ids, np.int32) for out in outs]
            logprobs, no_logits = None, cast(Any, None)  # tunix's vLLM engine returns none either
            if rollout_config.return_logprobs:
                logprobs = self._logprobs(outs, padded, tokens, rollout_config, is_free="logit_bias" not in params)
        return base_rollout.RolloutOutput(
            text=[self._text(own, ends) for own in tokens],
            logits=no_logits,
            tokens=tokens,
            left_padded_prompt_tokens=padded,
            logprobs=logprobs,
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Returns log-probabilities `[B, T]` of answers under the current weights, at the temperature of training.

        Prompts are padded on the left and answers on the right; padding has 0. If the pad token also ends answers, the
        first one at the end of an answer is not padding.

        Raises:
            RequestValidationError: a prompt and its answer are longer than a sequence may be.
        """
        prompts, answers = map(np.asarray, jax.device_get((prompt_tokens, completion_tokens)))
        is_pad = answers == self.pad_id()
        places = np.arange(answers.shape[1])
        is_end = places == np.where(is_pad, -1, places).max(axis=1, keepdims=True) + 1
        is_end &= self.pad_id() == self.eos_id()
        return jax.device_put(self._scores(prompts, answers, ~is_pad | is_end, self._temperature))

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Sets new weights: all of them, only LoRA's, or only the base weights; converts each set by one program.

        The conversion runs on the devices. On one device it donates the served weights, so that no memory for a second
        copy is needed: arrays that `llm.runner.params` returned or `llm.set_params` was given are deleted, and if it
        fails, nothing is generated until the next update. This waits for calls of `generate` in other threads, and
        later calls wait for it.

        Raises:
            InvalidParameterError: weights are missing, unknown, no arrays or of a wrong shape; nothing has changed.
            RequestValidationError: LoRA's rank is above `max_lora_rank`; nothing has changed.
            UnsupportedError: weights lie in host memory (`offload_to_cpu`).
        """
        lora, below = split_lora(_leaves(params))
        if lora or not below:
            wanted = {path + half: "an array" for path in self._scales for half in LORA}
            check_no_problems("these weights cannot be set", differences(dict.fromkeys(lora, "an array"), wanted))
        new = self._new_params(below) if below or not lora else None
        adapter = self._placed(self._adapt, lora) if lora else None
        with self._gate.alone():
            if adapter is not None:
                self.llm.set_lora(_ADAPTER, adapter)
            if new is not None:
                self.llm.set_params(new)

    def pad_id(self) -> int:
        """The token that pads prompts and answers."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The token that ends an answer."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """Returns None: if this returned the actor itself, tunix would not call `update_params`."""

    def close(self) -> None:
        """Frees the engine and its weights."""
        self.llm.close()

    def _new_params(self, leaves: Mapping[str, jax.Array]) -> NewParams:
        """Converts weights, now or, where they can write into the memory of the served ones, when they are set."""
        if self._serves_one and all(leaf.devices() == {self._device} for leaf in leaves.values()):
            served = self.llm.runner.params
            if not any(leaf.is_deleted() for leaf in jax.tree.leaves(served)):
                shapes = jax.eval_shape(lambda tree: tree, served_shapes(served))
                check_same_shapes(self._convert.eval_shape(leaves, shapes), shapes)
                return lambda served: self._convert(leaves, served)
        return self._placed(self._convert, leaves)

    def _placed(self, convert: Any, leaves: Mapping[str, jax.Array]) -> ParamTree:
        made = convert(leaves)
        return brought_to(self._device, made) if self._serves_one else made

    def _converted(self, leaves: dict[str, jax.Array], served: ParamTree | None = None) -> ParamTree:
        """Converts to the tree and the dtype of the served weights, whose memory it takes over if they are given.

        Under `jit` it shares no buffers with the actor, which may donate its own.
        """
        tree = lay_out(from_tree(leaves, self._cfg, self._rules), self._cfg, self._layout)
        return jax.tree.map(lambda leaf: leaf.astype(self._served), tree)

    def _adapted(self, leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return adapter_of(leaves, self._moves, self._scales, self._cfg)

    def _padded(self, ids: Sequence[Sequence[int]], asked: base_rollout.RolloutConfig) -> NDArray[np.int32]:
        most, width = max(map(len, ids)), asked.max_prompt_length
        padded = np.full((len(ids), width if width >= most else 1 << (most - 1).bit_length()), self.pad_id(), np.int32)
        for row, own in zip(padded, ids, strict=True):
            row[len(row) - len(own) :] = own
        return padded

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Tokenises a text as tunix's own sampler does; ids stay as they are."""
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        begin = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
        return [int(token) for token in self._tokenizer.dedup_bos_ids(begin + list(self._tokenizer.encode(prompt)))]

    def _text(self, tokens: np.ndarray, ends: Sequence[int]) -> str:
        ids = tokens.tolist()
        return self._tokenizer.decode(ids[:-1] if ids and ids[-1] in ends else ids)

    def _sampling(self, asked: base_rollout.RolloutConfig, ends: Sequence[int]) -> dict[str, Any]:
        """Returns arguments of `SamplingParams`; a top-p of None means greedy, as in tunix's own sampler."""
        greedy = asked.top_p is None
        found: dict[str, Any] = {
            "temperature": 0.0 if greedy else asked.temperature,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "top_k": max(asked.top_k or 0, 0),
            "max_tokens": asked.max_tokens_to_generate,
            "stop_token_ids": [end for end in ends if end < self._cfg.vocab_size],
            "logprobs": asked.return_logprobs,
        }
        if self.pad_id() not in ends and 0 <= self.pad_id() < self._cfg.vocab_size:
            found["logit_bias"] = {self.pad_id(): -np.inf}
        return found

    def _logprobs(
        self,
        outs: Sequence[Any],
        prompts: np.ndarray,
        tokens: Sequence[np.ndarray],
        asked: base_rollout.RolloutConfig,
        *,
        is_free: bool,
    ) -> list[np.ndarray]:
        """Returns log-probabilities of the actor: those of generation if no token was excluded, or scores."""
        greedy = asked.top_p is None or asked.temperature == 0
        if greedy or asked.temperature == 1:
            return [np.asarray(out.logprobs, np.float32) for out in outs]
        if is_free and asked.top_p == 1 and (asked.top_k or 0) <= 0:
            return [np.asarray(out.processed_logprobs, np.float32) for out in outs]
        answers = np.full((len(tokens), asked.max_tokens_to_generate), self.pad_id(), np.int32)
        for row, own in zip(answers, tokens, strict=True):
            row[: len(own)] = own
        is_answer = np.arange(answers.shape[1]) < np.array([[len(own)] for own in tokens])
        found = self._scores(prompts, answers, is_answer, asked.temperature)
        return [row[: len(own)] for row, own in zip(found, tokens, strict=True)]

    def _scores(
        self, prompts: np.ndarray, answers: np.ndarray, is_answer: np.ndarray, temperature: float
    ) -> NDArray[np.float32]:
        """Scores the tokens of answers: `[B, T]`, with 0 for other places and for a first token without a prompt."""
        found = np.zeros(answers.shape, np.float32)
        heads = [row[row != self.pad_id()].tolist() for row in prompts]
        tails = [row[own].tolist() for row, own in zip(answers, is_answer, strict=True)]
        whole = [head + tail for head, tail in zip(heads, tails, strict=True)]
        starts = [max(len(head), 1) for head in heads]
        rows = [at for at, (ids, start) in enumerate(zip(whole, starts, strict=True)) if len(ids) > start]
        scores = self.llm.score(
            [whole[at][: starts[at]] for at in rows],
            [whole[at][starts[at] :] for at in rows],
            None if temperature in (0, 1) else SamplingParams(temperature=temperature),
            lora_request=self._adapter,
        )
        for at, score in zip(rows, scores, strict=True):
            places = np.flatnonzero(is_answer[at])[starts[at] - len(heads[at]) :]
            found[at, places] = score.logprobs if score.processed_logprobs is None else score.processed_logprobs
        return found


class _Gate:
    """A lock that many threads share or one holds alone; threads that wait to be alone go before later ones."""

    def __init__(self):
        self._changed, self._num_inside, self._num_waiting = threading.Condition(), 0, 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Shares the lock; waits while a thread holds it alone or waits to."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_waiting)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Holds the lock alone; waits until no other thread holds it."""
        with self._changed:
            self._num_waiting += 1
            try:
                self._changed.wait_for(lambda: not self._num_inside)
                yield
            finally:
                self._num_waiting -= 1
                self._changed.notify_all()


def _mesh_asked(training: Any, given: MeshSizes) -> MeshSizes:
    """Returns the mesh to serve on; raises ConfigError for settings of a `RolloutConfig` that this engine ignores."""
    for name in ("data_parallel_size", "expert_parallel_size"):
        if (asked := getattr(training, name, 1)) > 1:
            raise ConfigError(f"{name} is {asked}, which this engine does not read: give serving_mesh")
    if getattr(training, "rollout_mapping_config", None) is not None:
        raise ConfigError("rollout_mapping_config is given, expected None: cfg and rules say where weights are")
    over = getattr(training, "tensor_parallel_size", 1)
    if over > 1 and given and EngineConfig(mesh=given).mesh_sizes.get("model", 1) != over:
        raise ConfigError(f"tensor_parallel_size is {over}, and serving_mesh is {given}: give one of them")
    return given or ({"model": over} if over > 1 else None)


def config_of(model: nnx.Module) -> ModelConfig:
    """Reads the configuration of a model of tunix, as its forward computes it even where fields say otherwise.

    Raises:
        UnsupportedError: the model is not Llama 3, Qwen 2, Qwen 3, Gemma 2 or Gemma 3, or it takes images.
    """
    names = [base.__module__ for base in type(model).__mro__]
    name = next((name for name in names if name.startswith("tunix.models.")), names[0])
    kind = name.removeprefix("tunix.models.").removesuffix(".model")
    if kind not in ("llama3", "qwen2", "qwen3", "gemma", "gemma3"):
        raise UnsupportedError(f"{type(model).__name__} of {name} is not supported: give cfg and rules")
    config: Any = cast(Any, model).config
    module = sys.modules[name]
    found: dict[str, Any] = {
        "hidden_size": config.embed_dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": POSITIONS,
    }
    if kind in ("gemma", "gemma3"):
        return ModelConfig.from_hf(found | _gemma_fields(config, module))
    found |= {"vocab_size": config.vocab_size, "rms_norm_eps": config.norm_eps, "rope_theta": _theta(config, module)}
    if kind == "llama3":
        return ModelConfig.from_hf(found | {"model_type": "llama", "tie_word_embeddings": config.weight_tying})
    found |= {"model_type": kind, "tie_word_embeddings": config.use_tied_embedding}
    if getattr(config, "num_experts", None):
        found |= {
            "model_type": "qwen3_moe",
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "moe_intermediate_size": config.hidden_dim,
            "norm_topk_prob": True,
        }
    return ModelConfig.from_hf(found)


def _theta(config: Any, module: Any) -> float:
    """Returns the RoPE base; for Llama 3 and Qwen 3, tunix 0.1.7 ignores the field and uses a default."""
    if not hasattr(module, "apply_rope") or "rope_theta" in module.Attention.block.__code__.co_names:
        return config.rope_theta
    return inspect.signature(module.apply_rope).parameters["rope_theta"].default


def _gemma_fields(config: Any, module: Any) -> dict[str, Any]:
    local = module.AttentionType.LOCAL_SLIDING
    found: dict[str, Any] = {
        "vocab_size": config.num_embed,
        "rms_norm_eps": 1e-6,
        "sliding_window": config.sliding_window_size or POSITIONS,
        "query_pre_attn_scalar": config.head_dim,
        "tie_word_embeddings": True,
    }
    if hasattr(config, "attention_types"):
        if not (config.use_post_attn_norm and config.use_post_ffw_norm):
            raise UnsupportedError("Gemma without norms after its blocks, the first version, is not supported")
        kinds = list(config.attention_types)[: config.num_layers]
        found |= {
            "model_type": "gemma2",
            "rope_theta": 10_000.0,
            "attn_logit_softcapping": config.attn_logits_soft_cap,
            "final_logit_softcapping": config.final_logit_softcap,
        }
    else:
        if config.vision_config is not None:
            raise UnsupportedError("a Gemma 3 that sees images is not supported: text_only=True is")
        if config.local_scale_factor != 1:
            raise UnsupportedError(f"local_scale_factor {config.local_scale_factor} is not supported, only 1 is")
        kinds = list(itertools.islice(itertools.cycle(module.GEMMA3_ATTENTION_PATTERN), config.num_layers))
        found |= {
            "model_type": "gemma3_text",
            "rope_theta": float(config.global_base_frequency),
            "rope_local_base_freq": float(config.local_base_frequency),
        }
        if config.global_scale_factor != 1:
            found["rope_scaling"] = {"rope_type": "linear", "factor": config.global_scale_factor}
        if config.query_pre_attn_norm != module.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_HEAD_DIM:
            found["query_pre_attn_scalar"] = config.embed_dim // config.num_heads
    return found | {"layer_types": [("full", "sliding")[kind == local] + "_attention" for kind in kinds]}


def _leaves(params: Any) -> dict[str, jax.Array]:
    """Maps paths to arrays: of an `nnx.State` only those of parameters, of any other tree all.

    Raises:
        InvalidParameterError: a leaf is no array of JAX.
        UnsupportedError: an array lies in host memory.
    """
    found = {}
    paths = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))[0]
    for path, leaf in paths:
        if isinstance(leaf, nnx.Variable) and not isinstance(leaf, nnx.Param):
            continue
        leaf = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        if not isinstance(leaf, jax.Array):
            raise InvalidParameterError(f"{name_of(path)} is a {type(leaf).__name__}, expected an array of JAX")
        if (where := leaf.sharding.memory_kind) not in (None, next(iter(leaf.devices())).default_memory().kind):
            raise UnsupportedError(f"{name_of(path)} lies in {where}: offload_to_cpu is not supported")
        found[name_of(path)] = leaf
    return found


def _seed(seed: Any) -> list[int]:
    """Converts a seed, an integer or a JAX key, into numbers; random ones if it is None."""
    if seed is None:
        return np.random.SeedSequence().generate_state(4).tolist()
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    return np.abs(np.asarray(seed, np.int64)).ravel().tolist()
