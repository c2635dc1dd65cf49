"""The OpenAI-compatible HTTP server, and the process beside it in which the engine runs."""
