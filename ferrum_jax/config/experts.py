"""The experts of a model: how many, of what size, in which layers, and how tokens are sent to them."""

from dataclasses import dataclass

from ferrum_jax.config.numbers import refuse_no_count, refuse_not_positive
from ferrum_jax.contract.errors import ConfigError, shown


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts, in Hugging Face's names."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int  # of one expert
    norm_topk_prob: bool  # a token's shares add up to one
    shared_expert_intermediate_size: int | None = None  # of the one that every token goes through
    sparse_layers: tuple[bool, ...]  # which layers have experts; the others have one feed-forward block
    scoring_func: str = "softmax"  # or "sigmoid", which comes with a learnt bias on the choice
    n_group: int = 1  # experts are in so many groups
    topk_group: int = 1  # of which a token chooses so many first
    routed_scaling_factor: float = 1.0  # on all shares
    swiglu_limit: float | None = None  # what gate and up are clamped to; no clamped SwiGLU if None
    swiglu_alpha: float = 1.702  # of the sigmoid in it

    def __post_init__(self):
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group"):
            refuse_no_count(name, getattr(self, name), 1)
        if self.shared_expert_intermediate_size is not None:
            refuse_no_count("shared_expert_intermediate_size", self.shared_expert_intermediate_size, 1)
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(f"a token cannot choose {self.num_experts_per_tok} of {self.num_experts} experts")
        if self.num_experts % self.n_group or self.topk_group > self.n_group:
            raise ConfigError(
                f"{self.topk_group} of {self.n_group} groups of {self.num_experts} experts cannot be chosen"
            )
        if self.num_experts_per_tok > self.num_experts // self.n_group * self.topk_group:
            raise ConfigError(f"{self.topk_group} groups have fewer than {self.num_experts_per_tok} experts")
        for name in ("routed_scaling_factor", "swiglu_alpha"):
            refuse_not_positive(name, getattr(self, name))
        if self.swiglu_limit is not None:
            refuse_not_positive("swiglu_limit", self.swiglu_limit)
        if not isinstance(self.sparse_layers, tuple) or not any(self.sparse_layers):
            raise ConfigError(f"sparse_layers is {shown(self.sparse_layers)}, expected a tuple with one true at least")
