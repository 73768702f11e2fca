"""The HTTP server, which is the extra `serve`: OpenAI's API over one engine."""
