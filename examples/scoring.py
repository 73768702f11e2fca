"""Scoring: which of several answers does the model find likeliest? Nothing is generated, a prompt is read once."""

import ferrum_jax

QUESTIONS = {
    "The capital of France is": [" Paris", " Lyon", " a fish"],
    "The opposite of hot is": [" cold", " warm", " a bicycle"],
    "Ice is made of": [" water", " wood", " stone"],
}
with ferrum_jax.LLM(max_seqs=3, kv_capacity=64, layout="scanned", progress=False) as llm:
    for prompt, answers in QUESTIONS.items():
        scores = llm.score(prompt, answers)
        for answer, score in zip(answers, scores, strict=True):
            greedy = "(greedy)" if score.is_greedy else ""
            print(f"{prompt}{answer:<16} {score.total:8.2f} nats, {len(score.token_ids)} tokens {greedy}")
        best = max(scores, key=lambda score: score.total)
        assert best is scores[0], prompt
