"""Command line, server configuration and what starts processes."""
