"""Bodies of requests and answers, as OpenAI's and vLLM's clients know them."""
