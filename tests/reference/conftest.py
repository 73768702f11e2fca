"""What the live comparisons with transformers share."""

import pytest


@pytest.fixture(autouse=True, scope="package")
def quiet() -> None:
    """Keeps transformers from drawing bars and from warning on loggers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
