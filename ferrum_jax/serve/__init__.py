"""The HTTP server (extra `serve`): OpenAI's API over one engine."""
