"""PETALS measured: survival, 8 bits, chains, training, validation and privacy."""
