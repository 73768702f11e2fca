"""What the state machine of every method draws its calls from."""

import numpy as np
from hypothesis import strategies as st

from ferrum_jax.compile.sampler import SlotSettings
from ferrum_jax.contract import FullLogits, GreedyArgmax, GreedyRepetitionPenalty, TokenSelectionMask
from tests.executor.answers import V
from tests.executor.conftest import CAPACITY

NAMES = "abcdef"  # more than the 4 slots
BASES = [[(7 * i + 11 * base) % V for i in range(CAPACITY)] for base in range(3)]  # prompts share their beginnings
IDS = st.sampled_from(NAMES)
TOKENS = st.one_of(
    st.builds(lambda base, n, tail: base[:n] + tail, st.sampled_from(BASES), st.integers(1, CAPACITY), st.just([])),
    st.builds(
        lambda base, n, tail: base[:n] + tail,
        st.sampled_from(BASES),
        st.integers(0, 30),
        st.lists(st.integers(0, V - 1), min_size=1, max_size=12),
    ),
)
PICK = st.integers(0, 11)
POLICIES = st.one_of(
    st.just(FullLogits()),
    st.just(GreedyArgmax()),
    st.builds(
        lambda mask, penalty, ids: GreedyArgmax(
            token_mask=TokenSelectionMask(fingerprint=len(mask), valid_token_mask=[*mask, 1]),
            repetition_penalty=GreedyRepetitionPenalty(penalty=penalty, token_ids=ids),
        ),
        st.lists(st.integers(0, 1), max_size=V - 1),
        st.sampled_from([0.5, 1.7]),
        st.lists(st.integers(0, V - 1), max_size=4),
    ),
)
SETTINGS = st.builds(
    SlotSettings,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**32 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.7]),
    presence_penalty=st.sampled_from([0.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.9]),
    min_position=st.sampled_from([0, 12]),
    stop_ids=st.just((5, 11)),
    num_logprobs=st.sampled_from([-1, 0, 3]),
    bias=st.dictionaries(st.integers(0, V - 1), st.sampled_from([-4.0, 2.5]), max_size=3),
    allowed_ids=st.one_of(st.none(), st.sets(st.integers(12, V - 1), min_size=2).map(tuple)),
    seen=st.one_of(st.none(), st.lists(st.integers(0, V - 1), min_size=1, max_size=5).map(np.array)),
    generated=st.one_of(st.none(), st.lists(st.integers(0, V - 1), min_size=1, max_size=5).map(np.array)),
)
WANTED = st.sampled_from(["nothing", "last", "all", "scores", "sampled", "sampled", "sampled"])
