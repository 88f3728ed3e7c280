"""firsttoken: five attacks on the time to the first token, on one model, one machine and one command."""

__version__ = "0.1.0"
