"""The SDK: what a user imports. Requests in, events out, sync and async."""
