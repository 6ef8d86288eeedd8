"""The environment of every test: no network, no GPU, no weights but those of motet-demo, and a small share of the CPU."""

from __future__ import annotations

import os

# Libraries read these at import, and servers that tests start inherit them. Two workers share the smallest machine's two
# cores; threads that wait must sleep, or they take the other worker's time.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing is ever fetched from a hub by a test.
os.environ["HF_HUB_OFFLINE"] = "1"
