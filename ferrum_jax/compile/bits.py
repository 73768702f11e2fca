"""Sets of tokens as bits, the lowest first: an eighth of a byte per token crosses to the device."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int
from numpy.typing import NDArray

WORD = 32  # tokens per int32


def num_words(vocab_size: int) -> int:
    """Words that hold a flag for every token."""
    return -(-vocab_size // WORD)


def pack_flags(flags: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Packs `[V]` flags into words."""
    packed = np.packbits(flags, bitorder="little")
    return np.pad(packed, (0, -len(packed) % 4)).view(np.int32)


def unpack_flags(words: Int[Array, "B W"], vocab_size: int) -> Bool[Array, "B V"]:
    """Unpacks each row's words inside a step."""
    bits = (words[:, :, None] >> jnp.arange(WORD, dtype=jnp.int32)) & 1
    return bits.reshape(len(words), -1)[:, :vocab_size] == 1
