"""Real weights, questions and text, pinned by hash and named by a short string."""

import warnings

# PEFT asks transformers for a flag that has been renamed; the message is for its authors, not for our users.
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
