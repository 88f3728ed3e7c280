"""12 · Staged healing: how well adapters stand in for layers."""
