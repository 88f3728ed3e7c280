"""The engine behind HTTP: OpenAI's completions, streamed, while the stages arrive."""
