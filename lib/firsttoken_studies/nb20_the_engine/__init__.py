"""20 · The engine, and the environment of CPS."""
