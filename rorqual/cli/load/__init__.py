"""Load for an OpenAI-compatible server, and what it measures. No torch."""
