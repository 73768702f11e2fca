"""A scheduler in thirty lines: prompts are read in chunks beside running decodes, in one forward each time."""

import ferrum_jax
from ferrum_jax.generate.tokenizer import load_tokenizer
from ferrum_jax.weights import hub

path = hub.resolve(None)
tokenizer = load_tokenizer(path)
texts = ["The capital of France is", "def fibonacci(n):", "Once upon a time, in a small village by the sea,"]
waiting = {f"request-{i}": tokenizer.encode(text) for i, text in enumerate(texts)}
answers: dict[str, list[int]] = {name: [] for name in waiting}
CHUNK, MAX_TOKENS = 8, 12

engine = ferrum_jax.EngineConfig(decode_rows=(3,), query_blocks=(1, 3), block_tokens=CHUNK, max_step_tokens=3 * CHUNK)
with ferrum_jax.load(path, max_seqs=3, kv_capacity=256, engine=engine, progress=False) as runner:
    while waiting:
        items = []
        for name, tokens in waiting.items():
            chunk = tokens[:CHUNK]
            items.append((name, chunk, runner.kv_len(name) or 0, len(chunk) == len(tokens)))
        for (name, chunk, _, _), logits in zip(items, runner.unified_forward(items), strict=True):
            del waiting[name][: len(chunk)]
            if logits is None:
                continue
            answers[name].append(int(logits.argmax()))
            waiting[name] = answers[name][-1:]
            if len(answers[name]) == MAX_TOKENS:
                del waiting[name]
                runner.release(name)
for (name, ids), text in zip(answers.items(), texts, strict=True):
    print(f"{name}: {text}{tokenizer.decode(ids)}")
assert "Paris" in tokenizer.decode(answers["request-0"])
