"""Schedulers, caches, samplers, engines, hosts and clients: who runs next, on what memory. Docstring only."""
