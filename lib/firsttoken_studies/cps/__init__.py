"""CPS measured: the environment, what recovery costs, policies, a learnt threshold."""
