"""Logits to token ids and log-probabilities: pure functions, usable inside compiled steps and outside."""

from ferrum_jax.sampling.logprobs import token_logprobs as token_logprobs
from ferrum_jax.sampling.sample import Choice as Choice
from ferrum_jax.sampling.sample import SampleInputs as SampleInputs
from ferrum_jax.sampling.sample import distribution as distribution
from ferrum_jax.sampling.sample import sample as sample
