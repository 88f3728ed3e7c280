"""52 · Chains of servers, offloading, and servers that come and go."""
