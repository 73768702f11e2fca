"""How long the slow tests run and with which seed, which the environment may give."""

import os
import random

SEED = int(os.environ.get("SEED") or random.SystemRandom().randrange(2**31))  # a failure prints it
SECONDS = float(os.environ.get("SECONDS", "300"))
OPERATIONS = int(os.environ.get("OPERATIONS", "200000"))
