"""The hook points of models/hooks.py in transformers' models: PyTorch hooks that keep each array, and change it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ferrum_jax.models import Edit, Point

Arrays = dict[Point, NDArray[Any]]  # [T, ...], of attention [N, T, S]
Edits = Mapping[Point, Edit[NDArray[Any]]]  # of those shapes
NO_EDITS: Edits = MappingProxyType({})
LEAST = -1e30  # transformers adds the least float32 to the scores of what a token does not see


def run(model: Any, tokens: list[int], edits: Edits = NO_EDITS) -> tuple[NDArray[np.float32], Arrays]:
    """Runs a model without a cache; returns logits `[T, V]`, and what every point has after the edits."""
    points = _Points(edits)
    with ExitStack() as stack, torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            for handle in points.register(index, layer, model.config):
                stack.callback(handle.remove)
        stack.enter_context(points)
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    assert set(edits) <= set(points.found)
    return logits, points.found


class _Points(TorchFunctionMode):
    """Visits the points of a forward.

    Most are inputs or outputs of modules. Others are in no module: scores and weights of attention are what its softmax
    takes and gives, router logits what the router's product gives. This mode sees the calls of both functions.
    """

    def __init__(self, edits: Edits):
        super().__init__()
        self.edits = edits
        self.found: Arrays = {}
        self.inside: tuple[int, Any] | None = None  # layer, and its attention or router, while that runs

    def visit(self, name: str, layer: int, x: Any, *, factor: float = 1, shift: Any = 0, seen: Any = None) -> None:
        """Keeps the array of a point, which is `factor * x + shift`, and changes it where there is an edit.

        The change is in place, in the tensor with which the model goes on: a residual branch that holds the same tensor
        has it as well. Scores that are not `seen` are -inf, weights 0, and stay so.
        """
        value = x * factor + shift
        if seen is not None:
            value = torch.where(seen, value, -torch.inf if name == "attn_scores" else 0.0)
        if (edit := self.edits.get(Point(name, layer))) is not None:
            changed = value * torch.from_numpy(edit.scale) + torch.from_numpy(edit.add)
            value = changed if seen is None else torch.where(seen, changed, value)
            x.copy_((value - shift) / factor)
        self.found[Point(name, layer)] = (value if value.is_floating_point() else value.int()).numpy()

    def register(self, index: int, layer: Any, cfg: Any) -> Iterator[Any]:
        """Hooks the modules of a layer; yields the handles."""
        attention, mlp = layer.self_attn, layer.mlp
        heads, kv_heads = cfg.num_attention_heads, cfg.num_key_value_heads

        def keep(name: str, **options: Any) -> Callable[[Any], None]:
            return partial(self.visit, name, index, **options)

        def by_head(name: str, count: int) -> Callable[[Any], None]:
            return lambda x: self.visit(name, index, x.unflatten(-1, (count, -1)))

        def fused_heads(x: Any) -> None:  # of Phi-3
            parts = x.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), dim=1)
            for name, part in zip("qkv", parts, strict=True):
                self.visit(name, index, part)

        def fused_mlp(x: Any) -> None:  # of Phi-3
            for name, part in zip(("mlp_pre", "mlp_pre_linear"), x.chunk(2, dim=-1), strict=True):
                self.visit(name, index, part)

        factor = getattr(layer, "residual_multiplier", 1)  # of Granite, whose layers scale what both blocks give
        has_later_norms = hasattr(layer, "post_feedforward_layernorm")
        later = layer.post_attention_layernorm  # the first module after attention has been added
        if has_later_norms:
            later = layer.pre_feedforward_layernorm if hasattr(layer, "pre_feedforward_layernorm") else mlp
        yield _before(layer, keep("resid_pre"))
        yield _before(later, keep("resid_mid"))
        yield _after(layer, keep("resid_post"))
        attn_out = layer.post_attention_layernorm if has_later_norms else attention.o_proj
        yield _after(attn_out, keep("attn_out", factor=factor))
        yield _after(layer.post_feedforward_layernorm if has_later_norms else mlp, keep("mlp_out", factor=factor))
        yield _before(attention.o_proj, by_head("z", heads))
        if hasattr(attention, "qkv_proj"):
            yield _after(attention.qkv_proj, fused_heads)
        else:
            yield _after(getattr(attention, "q_proj", None) or attention.q_b_proj, by_head("q", heads))
        if hasattr(attention, "k_proj"):
            yield _after(attention.k_proj, by_head("k", kv_heads))
            yield _after(attention.v_proj, by_head("v", kv_heads))
        yield from self._enter(index, attention)
        if hasattr(mlp, "experts"):
            router = mlp.gate if hasattr(mlp, "gate") else mlp.router
            yield from self._enter(index, router)
            yield router.register_forward_hook(partial(self._route, index))
            return
        if hasattr(mlp, "gate_up_proj"):
            yield _after(mlp.gate_up_proj, fused_mlp)
        else:
            yield _after(mlp.gate_proj, keep("mlp_pre"))
            yield _after(mlp.up_proj, keep("mlp_pre_linear"))
        yield _before(mlp.down_proj, keep("mlp_post"))

    def _enter(self, index: int, module: Any) -> Iterator[Any]:
        yield module.register_forward_pre_hook(lambda *_: setattr(self, "inside", (index, module)))
        yield module.register_forward_hook(lambda *_: setattr(self, "inside", None))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        layer, module = self.inside or (None, None)
        if layer is not None and hasattr(module, "o_proj") and func is functional.softmax:
            return self._attend(layer, module, *args, **kwargs)
        found = func(*args, **kwargs)
        if layer is not None and not hasattr(module, "o_proj") and func is functional.linear:
            self.visit("router_logits", layer, found)
        return found

    def _attend(self, layer: int, attention: Any, scores: Any, **options: Any) -> Any:
        own, shift = scores[0], 0
        if hasattr(attention, "sinks"):  # GPT-OSS: they are one more column, and the maximum is subtracted from all
            own, shift = scores[0, ..., :-1], attention.sinks[:, None, None] - scores[0, ..., -1:]
        seen = own > LEAST
        self.visit("attn_scores", layer, own, shift=shift, seen=seen)
        weights = functional.softmax(scores, **options)
        self.visit("pattern", layer, weights[0, ..., : own.shape[-1]], seen=seen)
        return weights

    def _route(self, layer: int, router: Any, _: Any, output: Any) -> None:
        """Visits a router's choice, which DeepSeek's leaves in any order, likeliest first.

        Where other experts are chosen, their shares are computed here: a router has no module between the two.
        """
        logits, shares, chosen = output
        order = shares.argsort(dim=-1, descending=True)
        for one in (shares, chosen):
            one.copy_(one.gather(1, order))
        torch.testing.assert_close(_shares_of(router, logits, chosen), shares)
        self.visit("expert_indices", layer, chosen)
        if Point("expert_indices", layer) in self.edits:
            shares.copy_(_shares_of(router, logits, chosen))
        self.visit("expert_weights", layer, shares)


def _shares_of(router: Any, logits: Any, chosen: Any) -> Any:
    is_sigmoid = hasattr(router, "e_score_correction_bias")
    shares = (logits.sigmoid() if is_sigmoid else logits.softmax(dim=-1)).gather(1, chosen)
    if getattr(router, "norm_topk_prob", not hasattr(router, "topk_method")):  # DeepSeek V2 never does, Mixtral always
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return shares * getattr(router, "routed_scaling_factor", 1.0)


def _before(module: Any, visit: Callable[[Any], None]) -> Any:
    def hook(_: Any, arguments: Any, named: Any) -> None:
        visit((arguments[0] if arguments else named["hidden_states"])[0])

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _after(module: Any, visit: Callable[[Any], None]) -> Any:
    def hook(_: Any, arguments: Any, output: Any) -> None:
        visit((output[0] if isinstance(output, tuple) else output)[0])

    return module.register_forward_hook(hook)
