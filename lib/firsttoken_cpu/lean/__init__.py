"""A Llama or Qwen2 decoder from config.json, safetensors and tokenizers alone: a start without transformers."""
