"""How long the slow tests run and with which seed, which the environment may say."""

import os

SEED = int(os.environ.get("SEED", "20"))
SECONDS = float(os.environ.get("SECONDS", "300"))
OPERATIONS = int(os.environ.get("OPERATIONS", "20000"))
