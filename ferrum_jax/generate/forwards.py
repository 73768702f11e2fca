"""One forward for rows of every kind, or several where the model has no such thing."""

from collections.abc import Sequence

from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.contract.llm import DecoderOnlyLLM, Logits, UnifiedRow


class Forwards:
    """Runs rows through a model by its unified forward, or, once that is refused as a method, one prefill per chunk.

    `score_apart` is true of a model that scores the rows of a batch one by one, so that some may have advanced before
    an error.
    """

    def __init__(self, model: DecoderOnlyLLM):
        self.are_unified = True
        self.score_apart = type(model).score_batch is DecoderOnlyLLM.score_batch
        self._model = model
        self._has_run = False  # a unified forward has succeeded, so a later refusal is not about the method

    def run(self, rows: Sequence[UnifiedRow]) -> list[Logits | None]:
        """Gives the logits of each row's last token, None where the row is not final.

        Where the forwards are not unified, rows may have advanced before an error.
        """
        if self.are_unified:
            try:
                logits = self._model.unified_forward(rows)
            except UnsupportedError:
                if self._has_run:
                    raise
                self.are_unified = False
            else:
                self._has_run = True
                return logits
        return self._run_apart(rows)

    def _run_apart(self, rows: Sequence[UnifiedRow]) -> list[Logits | None]:
        """Takes one prefill per chunk and one decode batch for the rest."""
        singles = [(cache_id, tokens[0], at) for cache_id, tokens, at, _ in rows if len(tokens) == 1 and at > 0]
        decoded = dict(zip([row[0] for row in singles], self._model.decode_batch(singles), strict=True))
        logits: list[Logits | None] = []
        for cache_id, tokens, _, is_final in rows:
            row = decoded[cache_id] if cache_id in decoded else self._model.prefill(cache_id, tokens)
            logits.append(row if is_final else None)
        return logits
