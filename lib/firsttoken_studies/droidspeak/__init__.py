"""DroidSpeak measured: layers, groups, loading, latency and quality, transfer."""
