"""DroidSpeak: another model's KV cache, of which one contiguous group of layers is recomputed.

``store.KVStore`` keeps what a sender computed, ``prefill.partial_prefill`` makes a receiver's cache of it and
``pipeline`` brings it over a link meanwhile; ``profile`` finds which layers to recompute,
``group_selection`` and ``gate`` decide at run time.
"""

import warnings

# PEFT asks transformers for a flag that has been renamed; the message is for its authors, not for our users.
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
