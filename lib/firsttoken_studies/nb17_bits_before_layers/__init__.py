"""17 · Bits before layers."""
