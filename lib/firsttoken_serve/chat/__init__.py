"""Text and tokens: the chat template, which runs in a process of its own, and what is shown of a token."""
