"""`LlmExecutor`: the asynchronous `ModelExecutor` contract over any `DecoderOnlyLLM`."""

from ferrum_jax.executor.llm_executor.executor import LlmExecutor as LlmExecutor
