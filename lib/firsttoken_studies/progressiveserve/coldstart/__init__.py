"""Cold starts, measured: a fresh process a trial, a cold cache, every phase told apart."""
