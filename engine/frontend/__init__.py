"""The client side of the host: tokenizing, detokenizing, stop strings. Never imports torch."""
