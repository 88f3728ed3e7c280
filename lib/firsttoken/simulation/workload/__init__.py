"""What is asked of an engine: prompts and answers of known lengths, and when each request arrives."""
