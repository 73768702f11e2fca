"""One model, no engine: the KV, the batch and the step as plain values.

The serving forward is an ordinary function of (params, kv, batch). Here it is called twice by hand: with two prompts,
then with one more token of each; the block tables are ours to choose.
"""

import functools

import jax
import jax.numpy as jnp

from ferrum_jax import models
from ferrum_jax.config import ModelConfig
from ferrum_jax.kvcache import state
from ferrum_jax.models import Batch, Rows

cfg = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
)
params = models.init_params(cfg, jax.random.key(0))
spec = state.CacheSpec(num_layers=3, num_blocks=6, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
kv = state.empty(spec)
step = jax.jit(functools.partial(models.family(cfg).forward, cfg=cfg), donate_argnums=1)

prompts = jnp.array([[5, 17, 2, 9, 30], [8, 8, 1, 0, 0]], jnp.int32)  # the second has three tokens and padding
counts = jnp.array([5, 3], jnp.int32)
tables = jnp.array([[4, 1, 0], [2, 5, 3]], jnp.int32)  # position p of row b lies in block tables[b, p // 4]
prefill = Batch(
    groups=(Rows(tokens=prompts, lengths=jnp.zeros(2, jnp.int32), counts=counts, tables=tables),),
    logit_rows=jnp.array([4, 7], jnp.int32),  # the last real token of each row, counted over both
)
logits, kv, _ = step(params, kv, prefill)
best = jnp.argmax(logits, axis=-1).astype(jnp.int32)

decode = Batch(
    groups=(Rows(tokens=best[:, None], lengths=counts, counts=jnp.ones(2, jnp.int32), tables=tables),),
    logit_rows=jnp.arange(2, dtype=jnp.int32),
)
logits, kv, _ = step(params, kv, decode)

whole = jnp.concatenate([prompts[:1], best[:1, None]], axis=1)
expected = models.forward(params, whole, cfg)[:, -1]
print("next tokens:", jnp.argmax(logits, axis=-1), "| largest difference to the forward without a cache:", end=" ")
print(f"{float(jnp.abs(logits[:1] - expected).max()):.1e}")
assert jnp.allclose(logits[:1], expected, atol=1e-4)
