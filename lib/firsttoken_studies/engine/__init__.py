"""The engine measured beside others, and under load with reused caches."""
