"""ProgressiveServe: serve a layer-pruned model first, heal it, bring the missing layers in meanwhile."""
