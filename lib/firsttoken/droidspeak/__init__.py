"""DroidSpeak: another model's KV cache, of which one contiguous group of layers is recomputed.

``store.KVStore`` keeps what a sender computed, ``prefill.partial_prefill`` makes a receiver's cache of it and
``pipeline`` brings it over a link meanwhile; ``profile`` finds which layers to recompute, and ``group_selection``
decides at run time.
"""
