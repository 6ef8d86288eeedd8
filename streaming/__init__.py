"""The Starlette application: REST, SSE, protocol words, admission. Never imports torch. Docstring only."""
