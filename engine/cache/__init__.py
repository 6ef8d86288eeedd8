"""Block pool, prefix hashes and KV groups: policy only, no tensors."""
