"""Fixtures for every floor. Tests need no network, no GPU, and no weights but those of motet-demo."""

from __future__ import annotations

import os

# Two cores are what the smallest machine has; libraries read these at import.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing is ever fetched from a hub by a test.
os.environ["HF_HUB_OFFLINE"] = "1"
