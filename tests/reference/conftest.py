"""What the live comparisons with transformers share."""

import pytest
from transformers.utils import logging


@pytest.fixture(autouse=True, scope="package")
def quiet() -> None:
    """Keeps transformers from drawing bars and from warning on loggers."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
