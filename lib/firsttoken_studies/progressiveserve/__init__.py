"""ProgressiveServe: layers, healing, cold starts and sessions that change stage, measured."""
