"""ProgressiveServe measured: layers, healing, cold starts, and sessions that change stage."""
