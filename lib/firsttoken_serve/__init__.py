"""The server: the commands serve, prefix and swarm, and OpenAI's protocol over HTTP, on the library's engine."""
