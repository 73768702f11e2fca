"""Whether sides that are to compute the same do: how far their logits are apart before they are timed.

Float32 sums in another order differ by 1e-5 of the largest logit after 30 layers. What rounds to the 11 bits of float16
or the 8 of bfloat16 on the way differs by so much more; llama.cpp, which rounds activations to 8 bits beside quantised
weights, by 0.04. More than twice that is allowed.
"""

from collections.abc import Mapping

import numpy as np

from bench.timing import Contestant

AGREEMENT = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 1e-1, "int8": 1e-1}  # of the largest logit, by dtype
OURS = AGREEMENT | {"float32": 1e-5}  # between two ways of ours: up to 3e-6 was measured


def run_once(sides: Mapping[str, Contestant], reference: str) -> tuple[dict[str, float], float]:
    """Runs every side once; gives how far its logits are from the reference's at most, and the latter's largest."""
    logits = {}
    for name, one in sides.items():
        one.restore()
        logits[name] = np.asarray(one.run(), np.float32)
    wanted = logits.pop(reference)
    return {name: float(np.abs(found - wanted).max()) for name, found in logits.items()}, float(np.abs(wanted).max())


def check_logits(
    row: str, sides: Mapping[str, Contestant], reference: str, limits: Mapping[str, float]
) -> dict[str, float]:
    """Runs every side once; gives how far its logits are from the reference's, as a share of the latter's largest.

    Args:
        row: what is compared, for the message.
        sides: calls that give logits.
        reference: one of them.
        limits: by side, that share at most.

    Raises:
        RuntimeError: a side is over its limit, or gave NaN.
    """
    found, largest = run_once(sides, reference)
    errors = {name: far / largest for name, far in found.items()}
    strayed = [
        f"{name} by {error:.2g} (limit {limits[name]:g})" for name, error in errors.items() if not error <= limits[name]
    ]
    if strayed:
        raise RuntimeError(
            f"{row}: logits differ from those of {reference}, relative to the largest: {', '.join(strayed)}"
        )
    return errors
